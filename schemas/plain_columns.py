"""Columns as JSON-ready rows: the output of `plain.to_plain` for each record, without building the records."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from schemas.block import Block
from schemas.shape import Field, fields_of

Columns = Mapping[str, list[Any]]


def plain_rows(block: Block) -> list[dict[str, Any]]:
    """The records of `block` as dictionaries, lists and scalars; policy versions as "epoch.number"; bytes in base64."""
    columns = {
        name: column.to_pylist() for name, column in zip(block.batch.schema.names, block.batch.columns, strict=True)
    }
    return _rows(block.kind, "", columns)


def _rows(kind: Any, prefix: str, columns: Columns) -> list[Any]:
    fields = fields_of(kind)
    values = [_values(prefix + field.name, field, columns) for field in fields]
    if hasattr(kind, "parse"):
        return [str(kind(*row)) for row in zip(*values, strict=True)]
    names = [field.name for field in fields]
    return [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]


def _values(name: str, field: Field, columns: Columns) -> list[Any]:
    if field.kind == "record":
        built = _rows(field.of, f"{name}.", columns)
        if not field.optional:
            return built
        parts = [values for path, values in columns.items() if path.startswith(f"{name}.")]
        absent = [all(part is None for part in row) for row in zip(*parts, strict=True)]
        return [None if missing else each for missing, each in zip(absent, built, strict=True)]
    values = columns[name]
    if field.kind == "mapping":
        return [None if pairs is None else dict(pairs) for pairs in values]
    if field.kind == "tuple" and hasattr(field.of, "__dataclass_fields__"):
        return [None if items is None else [_item(field.of, item) for item in items] for items in values]
    if field.of is bytes:
        return [None if value is None else base64.b64encode(value).decode() for value in values]
    return values


def _item(kind: Any, item: Mapping[str, Any]) -> Any:
    """A nested record, which Arrow returns as a dictionary."""
    if hasattr(kind, "parse"):
        return str(kind(*item.values()))
    return {
        field.name: _item(field.of, item[field.name])
        if field.kind == "record" and item[field.name] is not None
        else item[field.name]
        for field in fields_of(kind)
    }
