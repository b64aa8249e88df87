"""The Arrow type of each field of a record."""

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
    """The Arrow type of `field`."""
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
