"""The shape of a record: its fields, read once from the dataclass, as the two encodings need them."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import pyarrow as pa

_SCALARS: Mapping[type, pa.DataType] = {
    str: pa.utf8(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    bytes: pa.binary(),
}


class Field(NamedTuple):
    """One field: `kind` is scalar, array (an Arrow array), tuple, mapping or record.

    `of` is its element's Python type, an array's Arrow type.
    """

    name: str
    kind: Literal["scalar", "array", "tuple", "mapping", "record"]
    of: Any
    optional: bool
    choices: frozenset[str] | None
    arrow: pa.DataType
    plain: bool = False

    def chosen(self, where: str, value: Any) -> Any:
        """`value`, if the field has no choices or it is one of them. Raises ValueError naming them."""
        if self.choices is not None and value not in self.choices:
            raise ValueError(f"{where}: {str(value)[:80]!r} is not one of {sorted(self.choices)}")
        return value


@cache
def fields_of(record: Any) -> tuple[Field, ...]:
    """The fields of dataclass `record`, in order. Raises TypeError for an annotation that has no encoding."""
    hints = get_type_hints(record, include_extras=True)
    return tuple(_field(field.name, hints[field.name]) for field in dataclasses.fields(record))


def _struct(record: Any) -> pa.DataType:
    return pa.struct([pa.field(f.name, f.arrow, nullable=f.optional) for f in fields_of(record)])


def _field(name: str, hint: Any) -> Field:
    optional = False
    if get_origin(hint) in (types.UnionType, Union):
        inner = [part for part in get_args(hint) if part is not type(None)]
        if len(inner) != 1:
            raise TypeError(f"field {name}: only 'X | None' unions have an encoding, not {hint}")
        hint, optional = inner[0], True
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return Field(name, "array", args[1], optional, None, pa.list_(pa.field("item", args[1], nullable=False)))
    if origin is Literal:
        return Field(name, "scalar", str, optional, frozenset(args), pa.utf8())
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        item = _struct(args[0]) if dataclasses.is_dataclass(args[0]) else _SCALARS[args[0]]
        return Field(name, "tuple", args[0], optional, None, pa.list_(pa.field("item", item, nullable=False)))
    if origin is dict and args[0] is str and args[1] in _SCALARS:
        return Field(name, "mapping", args[1], optional, None, pa.map_(pa.utf8(), _SCALARS[args[1]]))
    if dataclasses.is_dataclass(hint):
        return Field(name, "record", hint, optional, None, _struct(hint))
    if hint in _SCALARS:
        return Field(name, "scalar", hint, optional, None, _SCALARS[hint], plain=hint is not float)
    raise TypeError(f"field {name}: no encoding for {hint}")
