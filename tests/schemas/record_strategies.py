"""Hypothesis strategies for records, generated from their annotations: every valid value of a field."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import strategies as st

from schemas.columns import ELEMENTS
from schemas.records import PolicyVersion
from schemas.shape import Field, fields_of

_NUMBERS = st.integers(0, 10**18 - 1)
_SCALARS: dict[type, st.SearchStrategy] = {
    str: st.text(max_size=20),
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    bytes: st.binary(max_size=20),
}
_ITEMS: dict[str, st.SearchStrategy] = {
    "int32": st.integers(-(2**31), 2**31 - 1),
    "int64": _SCALARS[int],
    "float": st.floats(allow_nan=False, allow_infinity=False, width=32),
    "bool": st.booleans(),
}


def records_of(kind: type) -> st.SearchStrategy:
    """Any record of class `kind`."""
    if kind is PolicyVersion:
        return st.builds(PolicyVersion, _NUMBERS, _NUMBERS)
    return st.builds(kind, *[_values_of(field) for field in fields_of(kind)])


def _values_of(field: Field) -> st.SearchStrategy:
    values = _present(field)
    return st.none() | values if field.optional else values


def _present(field: Field) -> st.SearchStrategy:
    if field.kind == "array":
        return st.lists(_ITEMS[field.of], max_size=5).map(lambda items: pa.array(items, ELEMENTS[field.of]))
    if field.kind == "record":
        return records_of(field.of)
    if field.choices is not None:
        return st.sampled_from(sorted(field.choices))
    item = _SCALARS[field.of] if field.of in _SCALARS else records_of(field.of)
    if field.kind == "tuple":
        return st.lists(item, max_size=3).map(tuple)
    if field.kind == "mapping":
        return st.dictionaries(_SCALARS[str], item, max_size=3)
    return item
