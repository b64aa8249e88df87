"""JSON encoding of the small control records, readable by any Kafka tool."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import orjson

from schemas.scalars import all_int64, checked_scalar
from schemas.shape import Field, fields_of

if TYPE_CHECKING:
    from schemas.block import Block  # it imports pyarrow, which readers of control records do not


def to_plain(record: Any) -> dict[str, Any]:
    """`record` as JSON-ready dictionaries, lists and scalars; policy versions as "epoch.number"; bytes in base64.

    Raises TypeError or ValueError that names the field with an invalid value.
    """
    kind: Any = type(record)
    return {
        field.name: _to_plain(f"{kind.__name__}.{field.name}", field, getattr(record, field.name))
        for field in fields_of(kind)
    }


def encode_json(record: Any) -> bytes:
    """`record` as compact UTF-8 JSON. Raises TypeError or ValueError if a value does not fit its field."""
    return orjson.dumps(to_plain(record))


def decode_json(kind: type, data: bytes) -> Any:
    """The record of class `kind` in `data`.

    Raises TypeError or ValueError that names the field that is missing, unknown or of the wrong type.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{kind.__name__}: not JSON ({error})") from error
    return from_plain(kind, value)


def add_defaults(kind: Any, data: bytes, fields: Collection[str]) -> bytes:
    """The JSON object `data` of a `kind` with the defaults of `fields`, which it lacks. Raises ValueError."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{kind.__name__}: not JSON ({error})") from error
    if not isinstance(value, dict) or not value.keys().isdisjoint(fields):
        raise ValueError(f"{kind.__name__}: expected an object without {', '.join(fields)}")
    return orjson.dumps(value | {name: kind.__dataclass_fields__[name].default for name in fields})


def remove_fields(data: bytes, fields: Collection[str]) -> tuple[bytes, list[str]]:
    """The JSON object `data` without `fields`, and those of them that are not empty (or 0)."""
    value = orjson.loads(data)
    shorter = {name: each for name, each in value.items() if name not in fields}
    return orjson.dumps(shorter), [name for name in fields if value[name]]


def from_plain(kind: type, value: Any) -> Any:
    """The record of class `kind` from `value`, the output of `to_plain`. Raises TypeError or ValueError."""
    if hasattr(kind, "parse") and isinstance(value, str):
        return kind.parse(value)
    if not isinstance(value, dict):
        raise ValueError(f"{kind.__name__}: expected an object, got {type(value).__name__}")
    fields = _named(kind)
    if value.keys() != fields.keys():
        _check_fields(kind, value)
    return kind(*[_from_plain(where, field, value.get(name)) for name, (where, field) in fields.items()])


@cache
def _named(kind: Any) -> dict[str, tuple[str, Field]]:
    """The fields of `kind` by name, each with its name in errors."""
    return {field.name: (f"{kind.__name__}.{field.name}", field) for field in fields_of(kind)}


def _check_fields(kind: type, value: Mapping[str, Any]) -> None:
    """Raise ValueError for an unknown field, and for a missing one that is not optional."""
    fields = _named(kind)
    unknown = value.keys() - fields.keys()
    if unknown:
        raise ValueError(f"{kind.__name__}: unknown fields {sorted(unknown)}")
    missing = [name for name, (_, field) in fields.items() if name not in value and not field.optional]
    if missing:
        raise ValueError(f"{kind.__name__}: missing fields {missing}")


def _to_plain(where: str, field: Field, value: Any) -> Any:
    if value is None:
        return _absent(where, field)
    if field.kind == "record":
        return _to_plain_item(where, field.of, value)
    if field.kind == "array":
        return value.to_pylist()
    if field.kind == "tuple":
        return [_to_plain_item(where, field.of, item) for item in value]
    if field.kind == "mapping":
        return {checked_scalar(where, str, name): _to_plain_item(where, field.of, item) for name, item in value.items()}
    return _to_plain_item(where, field.of, field.checked_choice(where, value))


def _to_plain_item(where: str, of: Any, value: Any) -> Any:
    if hasattr(of, "__dataclass_fields__"):
        if not isinstance(value, of):
            raise TypeError(f"{where}: expected {of.__name__}, got {type(value).__name__}")
        if not hasattr(of, "parse"):
            return to_plain(value)
        of.parse(str(value))  # it must be possible to read it
        return str(value)
    value = checked_scalar(where, of, value)
    return base64.b64encode(value).decode() if of is bytes else value


def _from_plain(where: str, field: Field, value: Any) -> Any:
    if value is None:
        return _absent(where, field)
    if field.kind == "scalar":
        return _from_plain_item(where, field.of, field.checked_choice(where, value))
    if field.kind == "record":
        return from_plain(field.of, value)
    if field.kind == "array":
        from schemas.columns import array_of  # imported on first use, see `codec`

        return array_of(where, field.of, value)
    if field.kind == "tuple":
        if not isinstance(value, list):
            raise ValueError(f"{where}: expected a list, got {type(value).__name__}")
        if field.of is int and all_int64(value):  # fast path: a large file has many thousands of chunks
            return tuple(value)
        return tuple([_from_plain_item(where, field.of, item) for item in value])
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, got {type(value).__name__}")
    return {checked_scalar(where, str, name): _from_plain_item(where, field.of, item) for name, item in value.items()}


def _from_plain_item(where: str, of: Any, value: Any) -> Any:
    if hasattr(of, "__dataclass_fields__"):
        return from_plain(of, value)
    if of is bytes and isinstance(value, str):
        return base64.b64decode(value, validate=True)
    return checked_scalar(where, of, value)


def _absent(where: str, field: Field) -> None:
    if not field.optional:
        raise ValueError(f"{where} is null")


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
