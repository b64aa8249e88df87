"""Constructors of array fields: immutable Arrow arrays, which compare by value and convert to NumPy without a copy."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pyarrow as pa

from schemas.shape import Field, fields_of

ELEMENTS: Mapping[str, pa.DataType] = {
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float": pa.float32(),
    "bool": pa.bool_(),
}
"""Element types of array fields, by name."""
_SCALARS: Mapping[type, pa.DataType] = {
    str: pa.utf8(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    bytes: pa.binary(),
}


@cache
def arrow_type(field: Field) -> pa.DataType:
    if field.kind == "array":
        return _list(ELEMENTS[field.of])
    if field.kind == "tuple":
        return _list(_item(field.of))
    if field.kind == "mapping":
        return pa.map_(pa.utf8(), _SCALARS[field.of])
    return _item(field.of)


def _item(of: Any) -> pa.DataType:
    if of in _SCALARS:
        return _SCALARS[of]
    return pa.struct([pa.field(part.name, arrow_type(part), nullable=part.optional) for part in fields_of(of)])


def _list(item: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("item", item, nullable=False))


def token_ids(values: object) -> pa.Array:
    """An int32 Arrow array of `values` (a NumPy array or a sequence of ints)."""
    return pa.array(values, pa.int32())


def floats(values: object) -> pa.Array:
    """A float32 Arrow array of `values`."""
    return pa.array(values, pa.float32())


def flags(values: object) -> pa.Array:
    """A bool Arrow array of `values`."""
    return pa.array(values, pa.bool_())


def true_flags(count: int) -> pa.Array:
    """A bool Arrow array of `count` values, all True: a part of one that is kept, since most responses need one."""
    return _trues(1 << count.bit_length()).slice(0, count)


@cache
def _trues(count: int) -> pa.Array:
    return pa.repeat(True, count)


def integers(values: object) -> pa.Array:
    """An int64 Arrow array of `values`."""
    return pa.array(values, pa.int64())


def array_of(where: str, element: str, values: object) -> pa.Array:
    """An Arrow array of `values` for the field `where`, with the element type named `element`. Raises ValueError."""
    try:
        return pa.array(values, ELEMENTS[element])
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise ValueError(f"{where}: {error}") from error


def one_list(kind: pa.DataType, values: object) -> pa.Array:
    """A column of list type `kind` with one row, `values`.

    An Arrow or NumPy array of the element type is not copied.
    """
    items = values if isinstance(values, pa.Array) else pa.array(values, kind.value_type)
    return pa.ListArray.from_arrays(pa.array([0, len(items)], pa.int32()), items, type=kind)
