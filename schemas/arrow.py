"""Arrow encoding: records of one kind as a record batch, nested records flattened to dotted columns.

The batch travels without its schema, which the record's header names: a short trajectory is a third of the bytes so, and the
reader validates every batch against its own schema anyway. Scalars of all columns cross into Arrow in one call, for a
conversion costs microseconds whatever it converts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pyarrow as pa

from schemas.shape import Field, fields_of


@dataclass(frozen=True, slots=True)
class _Layout:
    """The columns of a record kind: `scalars` convert together, `arrays` (by dotted name) are built from their values."""

    schema: pa.Schema
    names: tuple[str, ...]
    required: tuple[str, ...]
    scalars: pa.DataType
    scalar_names: tuple[str, ...]
    array_names: tuple[str, ...]
    array_types: Mapping[str, pa.DataType]


def encode_arrow(rows: Sequence[Any]) -> bytes:
    """`rows`, one or more records of one class, as an Arrow IPC record batch message.

    Raises TypeError or ValueError if a value does not fit its field.
    """
    kind = type(rows[0])
    layout = _layout(kind)
    scalars: list[dict[str, Any]] = [{} for _ in rows]
    arrays: dict[str, list[Any]] = {name: [] for name in layout.array_names}
    for row, into in zip(rows, scalars, strict=True):
        _flatten(kind, row, "", into, arrays)
    columns = dict(zip(layout.scalar_names, pa.array(scalars, layout.scalars).flatten(), strict=True))
    for name, values in arrays.items():
        columns[name] = _list_column(layout.array_types[name], values)
    batch = pa.RecordBatch.from_arrays([columns[name] for name in layout.names], schema=layout.schema)
    return batch.serialize().to_pybytes()  # type: ignore[no-any-return]


def decode_arrow(kind: type, data: bytes) -> list[Any]:
    """The records of class `kind` in `data`. Raises ValueError if the bytes are not a valid batch of them."""
    layout = _layout(kind)
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(data), layout.schema)
        batch.validate(full=True)
        columns = dict(zip(layout.names, batch.columns, strict=True))
        values = {name: columns[name].to_pylist() for name in layout.scalar_names}
        values |= {name: _arrays(columns[name]) for name in layout.array_names}
    except (pa.ArrowException, OSError, OverflowError, UnicodeDecodeError) as error:
        raise ValueError(f"{kind.__name__}: not a valid Arrow record batch ({error})") from error
    if not batch.num_rows:
        raise ValueError(f"{kind.__name__}: a batch without rows")
    for name in layout.required:
        if None in values[name]:
            raise ValueError(f"{kind.__name__}: {name} is null")
    build = _builder(kind, "")
    return [build(values, i) for i in range(batch.num_rows)]


def arrow_schema(kind: type) -> pa.Schema:
    """The flat Arrow schema in which records of class `kind` travel."""
    return _layout(kind).schema


@cache
def _layout(kind: type) -> _Layout:
    columns = list(_columns(kind, "", nullable=False))
    scalars = [pa.field(name, field.arrow) for name, field, _ in columns if field.kind != "array"]
    return _Layout(
        schema=pa.schema([pa.field(name, field.arrow, nullable=nullable) for name, field, nullable in columns]),
        names=tuple(name for name, _, _ in columns),
        required=tuple(name for name, field, nullable in columns if not nullable and field.kind != "array"),
        scalars=pa.struct(scalars),
        scalar_names=tuple(field.name for field in scalars),
        array_names=tuple(name for name, field, _ in columns if field.kind == "array"),
        array_types={name: field.arrow for name, field, _ in columns if field.kind == "array"},
    )


def _columns(kind: type, prefix: str, *, nullable: bool) -> list[tuple[str, Field, bool]]:
    columns: list[tuple[str, Field, bool]] = []
    for field in fields_of(kind):
        if field.kind == "record":
            columns += _columns(field.of, f"{prefix}{field.name}.", nullable=nullable or field.optional)
        else:
            columns.append((prefix + field.name, field, nullable or field.optional))
    return columns


def _flatten(kind: type, row: Any, prefix: str, scalars: dict[str, Any], arrays: Mapping[str, list[Any]]) -> None:
    for field in fields_of(kind):
        value = None if row is None else getattr(row, field.name)
        name = prefix + field.name
        if value is None and row is not None and not field.optional:
            raise ValueError(f"{name} must not be null")
        if field.kind == "record":
            _flatten(field.of, value, f"{name}.", scalars, arrays)
        elif field.kind == "array":
            if value is not None and (value.type != field.of or value.null_count):
                raise TypeError(f"{name} must be {field.of} without nulls, not {value.type}")
            arrays[name].append(value)
        elif field.choices is not None and value is not None and value not in field.choices:
            raise ValueError(f"{name} must be one of {sorted(field.choices)}, not {value!r}")
        else:
            scalars[name] = _items(value) if field.kind == "tuple" and value is not None else value


def _items(values: tuple[Any, ...]) -> list[Any]:
    if values and hasattr(values[0], "__dataclass_fields__"):
        return [{f.name: _plain(getattr(value, f.name)) for f in fields_of(type(value))} for value in values]
    return list(values)


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: _plain(getattr(value, f.name)) for f in fields_of(type(value))}
    return value


def _list_column(kind: pa.DataType, values: Sequence[pa.Array | None]) -> pa.Array:
    present = [value for value in values if value is not None]
    if len(present) < len(values):
        return pa.array([None if value is None else value.to_pylist() for value in values], kind)
    offsets = [0]
    for value in present:
        offsets.append(offsets[-1] + len(value))
    flat = present[0] if len(present) == 1 else pa.concat_arrays(present)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat, type=kind)


def _arrays(column: pa.Array) -> list[pa.Array | None]:
    arrays = [scalar.values for scalar in column]
    if any(array is not None and array.null_count for array in arrays):
        raise OverflowError("nulls inside a list")
    return arrays


Values = Mapping[str, list[Any]]


@cache
def _builder(kind: type, prefix: str) -> Callable[[Values, int], Any]:
    """A function from (values by column, row index) to the record."""
    parts = [_part(field, prefix) for field in fields_of(kind)]
    return lambda values, index: kind(*[part(values, index) for part in parts])


def _part(field: Field, prefix: str) -> Callable[[Values, int], Any]:
    name = prefix + field.name
    if field.kind == "record":
        build = _builder(field.of, f"{name}.")
        if not field.optional:
            return build
        names = [column for column, _, _ in _columns(field.of, f"{name}.", nullable=False)]
        return lambda values, index: None if all(values[n][index] is None for n in names) else build(values, index)
    if field.kind == "array" and not field.optional:
        return lambda values, index: _present(name, values[name][index])
    if field.kind == "tuple":
        return lambda values, index: _tuple(field.of, values[name][index])
    if field.kind == "mapping":
        return lambda values, index: None if values[name][index] is None else dict(values[name][index])
    if field.choices is not None:
        return lambda values, index: _chosen(name, field.choices or frozenset(), values[name][index])
    return lambda values, index: values[name][index]


def _present(name: str, array: pa.Array | None) -> pa.Array:
    if array is None:
        raise ValueError(f"{name} is null")
    return array


def _tuple(of: Any, items: list[Any] | None) -> tuple[Any, ...] | None:
    if items is None:
        return None
    return tuple([_revive(of, item) for item in items]) if hasattr(of, "__dataclass_fields__") else tuple(items)


def _chosen(name: str, choices: frozenset[str], value: str | None) -> str | None:
    if value is not None and value not in choices:
        raise ValueError(f"{name} is {value[:80]!r}, not one of {sorted(choices)}")
    return value


def _revive(of: Any, item: Any) -> Any:
    if isinstance(item, dict):
        return of(**{f.name: _revive(f.of, item[f.name]) for f in fields_of(of)})
    return item
