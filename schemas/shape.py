"""The fields of a record class, read once from the dataclass, as the two encodings need them."""

from __future__ import annotations

import dataclasses
import types
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

_SCALARS = (str, int, float, bool, bytes)


class Field(NamedTuple):
    """One field: `kind` is scalar, array (an Arrow array), tuple, mapping or record.

    `of` is the Python type of its elements, for an array the name of the Arrow type.
    """

    name: str
    kind: Literal["scalar", "array", "tuple", "mapping", "record"]
    of: Any
    optional: bool
    choices: frozenset[str] | None = None
    plain: bool = False

    def checked_choice(self, where: str, value: Any) -> Any:
        """`value`, if the field has no choices or it is one of them. Raises ValueError with the choices."""
        if self.choices is not None and value not in self.choices:
            raise ValueError(f"{where}: {str(value)[:80]!r} is not one of {sorted(self.choices)}")
        return value


@cache
def fields_of(record: Any) -> tuple[Field, ...]:
    """The fields of dataclass `record`, in order. Raises TypeError for an annotation without an encoding."""
    hints = get_type_hints(record, include_extras=True)
    return tuple(_field(field.name, hints[field.name]) for field in dataclasses.fields(record))


def _field(name: str, hint: Any) -> Field:
    optional = False
    if get_origin(hint) in (types.UnionType, Union):
        inner = [part for part in get_args(hint) if part is not type(None)]
        if len(inner) != 1:
            raise TypeError(f"field {name}: only 'X | None' unions have an encoding, not {hint}")
        hint, optional = inner[0], True
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return Field(name, "array", args[1], optional)
    if origin is Literal:
        return Field(name, "scalar", str, optional, frozenset(args))
    if origin is tuple and args[1:] == (...,) and (args[0] in _SCALARS or dataclasses.is_dataclass(args[0])):
        return Field(name, "tuple", args[0], optional)
    if origin is dict and args[0] is str and args[1] in _SCALARS:
        return Field(name, "mapping", args[1], optional)
    if dataclasses.is_dataclass(hint):
        return Field(name, "record", hint, optional)
    if hint in _SCALARS:
        return Field(name, "scalar", hint, optional, plain=hint is not float)
    raise TypeError(f"field {name}: no encoding for {hint}")
