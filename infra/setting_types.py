"""Types of settings with bounds, which the documents and the JSON Schema of a configuration show."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, Predicate

FINITE = Predicate(math.isfinite)
PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
Seed = Annotated[int, Ge(0), Lt(2**29)]
Port = Annotated[int, Ge(0), Le(65535)]
Positive = Annotated[float, Gt(0)]
"""May be infinite."""
NonNegative = Annotated[float, Ge(0)]
"""May be infinite."""
FinitePositive = Annotated[float, Gt(0), FINITE]
FiniteNonNegative = Annotated[float, Ge(0), FINITE]
Share = Annotated[float, Ge(0), Le(1)]
PositiveShare = Annotated[float, Gt(0), Le(1)]

_BOUNDS: Mapping[str, tuple[Callable[[Any, Any], bool], str]] = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "above"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "below"),
}


class CheckedSettings:
    """The base of dataclasses whose fields are within the bounds, or choices, of their types.

    pydantic checks a configuration file; this class checks an object that code makes, except the types of its values.
    Raises ValueError naming the field that is invalid.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, hint in _hints(kind).items():
            for field, value, of in _values(name, getattr(self, name), hint):
                if get_origin(of) is Literal and value not in get_args(of):
                    raise ValueError(f"{field} must be one of {', '.join(map(str, get_args(of)))}, not {value!r}")
                for bound in bounds_of(of):
                    if not _is_within(bound, value):
                        raise ValueError(f"{field} must be {requirement(bound)}, not {value}")
        self._check()

    def _check(self) -> None:
        """Raise ValueError for values within their bounds that are invalid, or do not fit each other."""


def bounds_of(hint: Any) -> list[Mapping[str, Any]]:
    """The bounds of a type, as pydantic's errors have them: {"ge": 1}; that of finite numbers: {"func": isfinite}."""
    return [asdict(bound) for bound in hint.__metadata__] if get_origin(hint) is Annotated else []


def requirement(bound: Mapping[str, Any]) -> str:
    """What values within a bound are: "at least 1"."""
    ((kind, limit),) = bound.items()
    if kind not in _BOUNDS:
        return "finite"
    return "positive" if bound == {"gt": 0} else f"{_BOUNDS[kind][1]} {int(limit) if limit == int(limit) else limit}"


def _is_within(bound: Mapping[str, Any], value: Any) -> bool:
    ((kind, limit),) = bound.items()
    return _BOUNDS[kind][0](value, limit) if kind in _BOUNDS else limit(value)


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind)}


def _values(name: str, value: Any, hint: Any) -> Iterator[tuple[str, Any, Any]]:
    """`value` or, if it is a tuple or a table, the values in it; each with its name and type."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if value is not None:
            yield from _values(name, value, inner[0])
    elif origin is tuple:
        for item in value:
            yield from _values(name, item, inner[0])
    elif origin is Mapping:
        for key, item in value.items():
            yield from _values(f"{name}.{key}", item, inner[1])
    else:
        yield name, value, hint
