"""Arrow encoding: records of one class as a record batch, with nested records flattened to dotted columns.

The batch is sent without its schema, which the record's header names: this cuts a short trajectory to a third of the
bytes, and the reader validates every batch against its own schema anyway. One call converts all columns to Arrow, and
records are built column by column, because a call into Arrow costs microseconds whatever its size.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import compress
from typing import Any

import pyarrow as pa

from schemas.column_checks import ColumnCheck, check_column, column_check
from schemas.columns import ELEMENTS, arrow_type
from schemas.flatbuffer import field_of, table_at
from schemas.hidden_modules import hidden_modules
from schemas.plain import Columns
from schemas.records.prompts import Prompt
from schemas.scalars import checked_float, checked_scalar
from schemas.shape import Field, fields_of
from schemas.stack import read_stacked

with hidden_modules():
    pa.array([0])  # pyarrow now looks for pandas, and later only for what needs it, such as `to_pandas`


@dataclass(frozen=True, slots=True)
class _Layout:
    """The columns of a record class. `row_bytes` is the minimum size of a row: all lists and strings empty."""

    columns: tuple[tuple[str, Field, bool], ...]
    schema: pa.Schema
    checks: tuple[ColumnCheck, ...]
    rows: pa.DataType
    arrays: frozenset[str]
    row_bytes: int


def encode_arrow(rows: Sequence[Any]) -> bytes:
    """Encode `rows`, one or more records of one class, as an Arrow IPC record batch message.

    Raises TypeError or ValueError if a value does not fit its field.
    """
    return flatten_records(rows).serialize().to_pybytes()  # type: ignore[no-any-return]


def decode_arrow(kind: type, data: bytes) -> list[Any]:
    """The records of class `kind` in `data`. Raises ValueError if the bytes are not a valid batch of them."""
    return build_records(kind, _read(kind, data))


def decode_columns(kind: type, data: bytes) -> pa.RecordBatch:
    """The columns of the records of class `kind` in `data`, checked as `decode_arrow` does. Raises ValueError."""
    batch = _read(kind, data)
    _check_values(kind, batch)
    return batch


def decode_many(kind: type, values: Sequence[bytes]) -> tuple[pa.RecordBatch, list[int]]:
    """Decode one or more `values` as `decode_columns` does, into one batch, and count the rows of each value.

    The cost per value falls with their number. Raises ValueError if one of them is invalid.
    """
    try:
        batch, counts = read_stacked(_layout(kind).schema, values, partial(_read, kind))
    except (OverflowError, struct.error) as error:
        raise ValueError(f"{kind.__name__}: not valid Arrow record batches ({error})") from error
    _check_values(kind, batch)
    return batch, counts


def add_empty_columns(kind: type, data: bytes, names: Collection[str]) -> bytes:
    """`data` of an earlier version of `kind`, which lacked the columns of fields `names`: lists are empty, others null.

    Raises ValueError if the bytes are not a valid batch of that version.
    """
    schema = _layout(kind).schema
    added = {column for column in schema.names if any(_is_in(column, name) for name in names)}
    batch = _read(kind, data, _layout_of([column for column in _layout(kind).columns if column[0] not in added]))
    arrays = [
        _empty(field.type, batch.num_rows) if field.name in added else batch.column(field.name) for field in schema
    ]
    complete = pa.RecordBatch.from_arrays(arrays, schema=schema)
    return complete.serialize().to_pybytes()  # type: ignore[no-any-return]


def remove_columns(kind: type, data: bytes, names: Collection[str]) -> tuple[bytes, list[str]]:
    """`data` without the columns of fields `names`, as an earlier version of `kind`; and those that are not empty.

    Raises ValueError if the bytes are not a valid batch.
    """
    batch = _read(kind, data)
    of_field = {name: [column for column in batch.schema.names if _is_in(column, name)] for name in names}
    filled = [name for name, columns in of_field.items() if not all(_is_empty(batch.column(each)) for each in columns)]
    removed = {column for columns in of_field.values() for column in columns}
    kept = [column for column in _layout(kind).columns if column[0] not in removed]
    arrays = [batch.column(name) for name, _, _ in kept]
    shorter = pa.RecordBatch.from_arrays(arrays, schema=_layout_of(kept).schema)
    return shorter.serialize().to_pybytes(), filled


def _is_in(column: str, field: str) -> bool:
    """Whether `column` is of `field`, or of a field in it."""
    return f"{column}.".startswith(f"{field}.")


def flatten_records(rows: Sequence[Any]) -> pa.RecordBatch:
    """`rows`, one or more records of one class, as columns. Raises TypeError or ValueError as `encode_arrow` does."""
    kind: Any = type(rows[0])
    flat = []
    flattened: _Flattened = {}
    for row in rows:
        if type(row) is not kind:
            raise TypeError(f"rows of {kind.__name__} and {type(row).__name__} cannot be in one record")
        values: dict[str, Any] = {}
        _flatten(kind, row, "", values, flattened)
        flat.append(values)
    try:
        # Set the schema again: a struct array loses the nullability of its fields.
        batch = pa.RecordBatch.from_struct_array(pa.array(flat, _layout(kind).rows))
        return pa.RecordBatch.from_arrays(batch.columns, schema=_layout(kind).schema)
    except OverflowError as error:
        raise ValueError(f"{kind.__name__}: an integer is beyond 64 bits ({error})") from error


def build_records(kind: type, batch: pa.RecordBatch) -> list[Any]:
    """The records of class `kind` with the columns of `batch`. Raises ValueError if a value is invalid."""
    arrays = _layout(kind).arrays
    try:
        values = {
            name: _arrays(column) if name in arrays else column.to_pylist()
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        }
    except (pa.ArrowException, OverflowError, UnicodeDecodeError) as error:
        raise ValueError(f"{kind.__name__}: not a valid Arrow record batch ({error})") from error
    return _build(kind, "", values)


def arrow_schema(kind: type) -> pa.Schema:
    """The flat Arrow schema of records of class `kind`."""
    return _layout(kind).schema


def _empty(of: pa.DataType, count: int) -> pa.Array:
    return pa.array([[]] * count, of) if pa.types.is_list(of) else pa.nulls(count, of)


def _is_empty(column: pa.Array) -> bool:
    return not len(column.flatten()) if pa.types.is_list(column.type) else column.null_count == len(column)


@cache
def _layout(kind: Any) -> _Layout:
    return _layout_of(_columns(kind, "", nullable=False))


def _layout_of(columns: Sequence[tuple[str, Field, bool]]) -> _Layout:
    schema = pa.schema([pa.field(name, arrow_type(field), nullable=nullable) for name, field, nullable in columns])
    return _Layout(
        columns=tuple(columns),
        schema=schema,
        checks=tuple(column_check(field, of.choices) for field, (_, of, _) in zip(schema, columns, strict=True)),
        rows=pa.struct(list(schema)),
        arrays=frozenset(name for name, field, _ in columns if field.kind == "array"),
        row_bytes=sum(8 if field.of in (int, float) and field.kind == "scalar" else 4 for _, field, _ in columns),
    )


@cache
def _named(kind: Any, prefix: str) -> tuple[tuple[str, Field], ...]:
    return tuple((prefix + field.name, field) for field in fields_of(kind))


def _columns(kind: type, prefix: str, *, nullable: bool) -> list[tuple[str, Field, bool]]:
    columns: list[tuple[str, Field, bool]] = []
    for field in fields_of(kind):
        if field.kind == "record":
            columns += _columns(field.of, f"{prefix}{field.name}.", nullable=nullable or field.optional)
        else:
            columns.append((prefix + field.name, field, nullable or field.optional))
    return columns


_Flattened = dict[tuple[str, int], dict[str, Any]]
"""A row that has a nested record, by its field and the identity of that record: the rows of a group share a prompt."""


def _flatten(kind: type, row: Any, prefix: str, into: dict[str, Any], flattened: _Flattened) -> None:
    """Write the fields of `row` (None for an absent optional record) to `into`, by dotted name."""
    for name, field in _named(kind, prefix):
        value = None if row is None else getattr(row, field.name)
        if type(value) is field.of and field.plain:
            into[name] = value  # Arrow performs the remaining checks
        elif value is None and row is not None and not field.optional:
            raise ValueError(f"{name} must not be null")
        elif field.kind == "record":
            if (known := flattened.get((name, id(value)))) is None:
                _flatten(field.of, value, f"{name}.", into, flattened)
                flattened[name, id(value)] = into
            else:
                for leaf in _leaves(field.of, f"{name}."):
                    into[leaf] = known[leaf]
        elif value is None:
            into[name] = None
        elif field.kind == "scalar":
            into[name] = checked_scalar(name, field.of, field.checked_choice(name, value))
        elif field.kind == "array":
            if value.type != ELEMENTS[field.of] or value.null_count:
                raise TypeError(f"{name} must be {field.of} without nulls, not {value.type}")
            into[name] = _elements(value)
        else:
            into[name] = _plain(name, field, value)


def _elements(array: pa.Array) -> Any:
    try:
        return array.to_numpy(zero_copy_only=False)  # Arrow copies an array at once, but iterates over a list
    except ImportError:  # read-only commands do not load NumPy
        return array.to_pylist()


def _plain(where: str, field: Field, value: Any) -> Any:
    if field.kind == "tuple":
        return [_plain_item(where, field.of, each) for each in value]
    if field.kind == "mapping":
        return {checked_scalar(where, str, key): checked_scalar(where, field.of, each) for key, each in value.items()}
    return _plain_item(where, field.of, value)


def _plain_item(where: str, of: Any, value: Any) -> Any:
    if hasattr(of, "__dataclass_fields__"):
        return {part.name: _plain(f"{where}.{part.name}", part, getattr(value, part.name)) for part in fields_of(of)}
    return checked_scalar(where, of, value)


def _read(kind: type, data: bytes, layout: _Layout | None = None) -> pa.RecordBatch:
    """The columns in `data`, valid as Arrow data; values are not checked. Raises ValueError."""
    layout = layout or _layout(kind)
    try:
        message = pa.ipc.read_message(pa.py_buffer(data))
        _reject_compression(message.metadata)
        batch = pa.ipc.read_record_batch(message, layout.schema)
        rows = batch.num_rows
        # Columns that share buffers could expand few bytes to many values.
        if not 0 < rows * layout.row_bytes <= len(data):
            raise OverflowError(f"{rows} rows in {len(data)} bytes")
        batch.validate(full=True)
    except (pa.ArrowException, OSError, EOFError, OverflowError, struct.error) as error:
        raise ValueError(f"{kind.__name__}: not a valid Arrow record batch ({error})") from error
    return batch


def _check_values(kind: type, batch: pa.RecordBatch) -> None:
    """Raise ValueError for a value that Arrow permits and the record does not."""
    for check, column in zip(_layout(kind).checks, batch.columns, strict=True):
        check_column(check, column)


def _reject_compression(metadata: pa.Buffer) -> None:
    """Raise OverflowError if the batch is compressed: Laminar writes none, and Arrow trusts the declared size."""
    batch = table_at(metadata, field_of(metadata, table_at(metadata, 0), 2))
    if field_of(metadata, batch, 3):
        raise OverflowError("compressed buffers are not accepted")


def _arrays(column: pa.ListArray) -> list[pa.Array | None]:
    arrays = [scalar.values for scalar in column]
    if any(array is not None and array.null_count for array in arrays):
        raise OverflowError("a list contains nulls")
    return arrays


def _build(kind: type, prefix: str, columns: Columns) -> list[Any]:
    """The records with `columns`, by dotted name."""
    values = []
    for name, field in _named(kind, prefix):
        if field.kind == "record":
            build = _build_present if field.optional else _build_shared if field.of is Prompt else _build
            values.append(build(field.of, f"{name}.", columns))
        elif not field.plain:
            values.append(_field_values(name, field, columns[name]))
        elif None in columns[name] and not field.optional:
            raise ValueError(f"{name} is null")
        else:
            values.append(columns[name])
    return list(map(kind, *values))


def _field_values(name: str, field: Field, column: list[Any]) -> list[Any]:
    if not field.optional and any([value is None for value in column]):  # noqa: C419 - a short list is faster
        raise ValueError(f"{name} is null")
    if field.kind == "array":
        return column
    if field.kind == "tuple":
        return [None if items is None else tuple([_revive(name, field.of, item) for item in items]) for items in column]
    if field.kind == "mapping":
        return [None if items is None else dict(items) for items in column]
    return [
        None if value is None else checked_scalar(name, field.of, field.checked_choice(name, value)) for value in column
    ]


def _build_shared(kind: type, prefix: str, columns: Columns) -> list[Any]:
    """Like `_build`, with one object for rows that are equal in all of its columns, as those of a group are."""
    names = _leaves(kind, prefix)
    numbers = columns[names[0]]
    if len(set(numbers)) == len(numbers):
        return _build(kind, prefix, columns)
    rows = list(zip(*[columns[name] for name in names], strict=True))
    first: dict[Any, int] = {}
    alike = [first.setdefault(number, at) for at, number in enumerate(numbers)]
    same_as = [like if like == at or rows[like] == rows[at] else at for at, like in enumerate(alike)]
    built = sorted(set(same_as))
    left = {name: [columns[name][at] for at in built] for name in names}
    records = dict(zip(built, _build(kind, prefix, left), strict=True))
    return [records[at] for at in same_as]


def _build_present(kind: type, prefix: str, columns: Columns) -> list[Any]:
    """Like `_build`, with None for rows in which every column is null."""
    parts = [columns[name] for name in _leaves(kind, prefix)]
    present = [row.count(None) < len(row) for row in zip(*parts, strict=True)]
    if all(present):
        return _build(kind, prefix, columns)
    left = {name: list(compress(columns[name], present)) for name in _leaves(kind, prefix)}
    records = iter(_build(kind, prefix, left) if any(present) else ())
    return [next(records) if there else None for there in present]


@cache
def _leaves(kind: Any, prefix: str) -> tuple[str, ...]:
    return tuple(name for name, _, _ in _columns(kind, prefix, nullable=True))


def _revive(where: str, of: Any, item: Any) -> Any:
    if item is None:
        raise ValueError(f"{where} contains a null")
    if isinstance(item, dict):
        return of(*[_revive(f"{where}.{field.name}", field.of, item[field.name]) for field in fields_of(of)])
    if isinstance(item, list):
        return tuple([_revive(where, of, part) for part in item])
    return checked_float(where, item) if of is float else item
