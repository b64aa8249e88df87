"""Values between two programs in sandboxes, as JSON: data by value, everything else by reference. No pickle.

A scalar of JSON stands for itself; any other value is a list that begins with a tag. Mutable containers are entries of
a table, so that identity and cycles survive, and so that a reply can carry what a call did to its arguments. Decoding
builds the types named here and no others. Imports nothing but the standard library: it runs inside the sandbox.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import fractions
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

_MAX_PLAIN_INTEGER = 1 << 64
"""Larger integers are sent as hexadecimal: decimal digits are limited in Python."""

TYPES: dict[str, type] = {
    each.__qualname__: each
    for each in (
        bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, slice, object,
        collections.Counter, collections.OrderedDict, collections.defaultdict, collections.deque, datetime.date,
        datetime.datetime, datetime.time, datetime.timedelta, decimal.Decimal, fractions.Fraction, types.NoneType,
        *(kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, BaseException)),
    )
}  # fmt: skip
"""Types that are the same in both programs."""
MODULES = frozenset(
    {"bisect", "cmath", "collections", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "math"}
    | {"numpy", "random", "re", "statistics", "string", "typing"}
)
"""Modules that a program uses its own copy of where the other sends one."""
_PLAIN: tuple[Callable[[Any], Any], ...] = (bool, int, float, complex, str, bytes, tuple, frozenset, list, dict, set)
_ISO: dict[str, Any] = {"date": datetime.date, "datetime": datetime.datetime, "time": datetime.time}
_ARRAYS = "biufc"


class Encoder:
    """Encodes the values of one message. `refer` encodes what cannot be sent by value."""

    def __init__(self, refer: Callable[[Any], Any], known: list[Any] | None = None) -> None:
        """`known` are the first containers of the table: those of the message that this one answers."""
        self._refer = refer
        self.containers: list[Any] = list(known or ())
        self._index = {id(each): index for index, each in enumerate(self.containers)}
        self._done = 0
        self._known = len(self.containers)
        self.table: list[Any] = []

    def encode(self, value: Any) -> Any:
        """`value` as JSON; its containers are encoded by `finish`."""
        kind = type(value)
        if value is None or kind in (bool, str, float):
            return value
        if kind is int:
            return value if -_MAX_PLAIN_INTEGER < value < _MAX_PLAIN_INTEGER else ["int", hex(value)]
        if kind in _CONTAINERS:
            if id(value) not in self._index:
                self._index[id(value)] = len(self.containers)
                self.containers.append(value)
            return ["container", self._index[id(value)]]
        if kind in (tuple, frozenset):
            return [kind.__name__, [self.encode(each) for each in value]]
        if (simple := _simple(value)) is not None:
            return simple
        return self._refer(value)

    def finish(self) -> list[Any]:
        """The table: an entry for each container."""
        while self._done < len(self.containers):
            container = self.containers[self._done]
            self._done += 1
            self.table.append(self._entry(container))
        return self.table

    def _entry(self, container: Any) -> Any:
        kind = type(container)
        name = kind.__name__
        if kind is bytearray:
            return [name, container.hex()]
        if issubclass(kind, dict):
            items = [[self.encode(key), self.encode(each)] for key, each in container.items()]
            return (
                [name, items, self.encode(container.default_factory)]
                if kind is collections.defaultdict
                else [name, items]
            )
        items = [self.encode(each) for each in container]
        return [name, items, container.maxlen] if kind is collections.deque else [name, items]


class Decoder:
    """Decodes the values of one message. `resolve` decodes references. Raises ValueError for what is no message."""

    def __init__(self, resolve: Callable[[list[Any]], Any], table: list[Any], known: list[Any] | None = None) -> None:
        """`known` are containers of this program that the first entries of the table fill anew."""
        self._resolve = resolve
        self.containers: list[Any] = list(known or ())[: len(table)]
        for entry in table[len(self.containers) :]:
            maxlen = entry[2] if entry[0] == "deque" else None
            made = collections.deque(maxlen=maxlen) if entry[0] == "deque" else _NAMES[entry[0]]()
            self.containers.append(made)
        for container, entry in zip(self.containers, table, strict=True):
            self._fill(container, entry)

    def decode(self, node: Any) -> Any:
        """The value that `node` stands for."""
        if not isinstance(node, list):
            return node
        tag, *parts = node
        if tag == "container":
            return self.containers[int(parts[0])]
        if tag in ("tuple", "frozenset"):
            values = (self.decode(each) for each in parts[0])
            return tuple(values) if tag == "tuple" else frozenset(values)
        if tag in _SIMPLE:
            return _SIMPLE[tag](*parts)
        return self._resolve(node)

    def _fill(self, container: Any, entry: list[Any]) -> None:
        if _NAMES.get(entry[0]) is not type(container):
            raise ValueError(f"a {type(container).__name__} cannot become a {entry[0]!r}")
        if isinstance(container, bytearray):
            container[:] = bytes.fromhex(entry[1])
            return
        if isinstance(container, dict):
            items = [(self.decode(key), self.decode(value)) for key, value in entry[1]]
            container.clear()
            for key, value in items:
                dict.__setitem__(container, key, value)
            if isinstance(container, collections.defaultdict):
                factory = self.decode(entry[2])
                container.default_factory = factory if factory is None or callable(factory) else None
            return
        values = [self.decode(each) for each in entry[1]]
        container.clear()
        container.update(values) if isinstance(container, set) else container.extend(values)


def plain(value: Any) -> Any:
    """The plain value of an object whose class derives from that of one (a named tuple's tuple), or None."""
    for kind in _PLAIN:
        if isinstance(value, kind):  # type: ignore[arg-type]
            return kind(value)
    return None


def _simple(value: Any) -> Any:
    """Immutable values, types and modules that are the same in both programs; None for all else."""
    kind = type(value)
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind is bytes:
        return ["bytes", value.hex()]
    if kind is range:
        return ["range", *(hex(each) for each in (value.start, value.stop, value.step))]
    if kind is slice and all(each is None or type(each) is int for each in (value.start, value.stop, value.step)):
        return ["slice", value.start, value.stop, value.step]
    if value is Ellipsis:
        return ["ellipsis"]
    if kind is fractions.Fraction:
        return ["Fraction", hex(value.numerator), hex(value.denominator)]
    if kind is decimal.Decimal:
        return ["Decimal", str(value)]
    if kind is datetime.timedelta:
        return ["timedelta", value.days, value.seconds, value.microseconds]
    if kind in _ISO.values():
        return [kind.__name__, value.isoformat()]
    if isinstance(value, type):
        return ["type", value.__qualname__] if TYPES.get(value.__qualname__) is value else None
    if isinstance(value, types.ModuleType):
        return ["module", value.__name__] if value.__name__ in MODULES else None
    return _array(value)


def _array(value: Any) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray | numpy.generic) or value.dtype.kind not in _ARRAYS:
        return None
    scalar = not isinstance(value, numpy.ndarray)
    return ["array", value.dtype.kind + str(value.dtype.itemsize), list(value.shape), value.tobytes().hex(), scalar]


def _array_of(dtype: str, shape: list[int], data: str, scalar: bool) -> Any:
    numpy = importlib.import_module("numpy")
    if dtype[0] not in _ARRAYS:
        raise ValueError(f"no array of {dtype!r}")
    array = numpy.frombuffer(bytes.fromhex(data), dtype).reshape(shape).copy()
    return array[()] if scalar else array


def _module(name: str) -> types.ModuleType:
    if name not in MODULES:
        raise ValueError(f"no module {name!r}")
    return importlib.import_module(name)


_CONTAINERS = (
    list, dict, set, bytearray, collections.Counter, collections.OrderedDict, collections.defaultdict, collections.deque
)  # fmt: skip
_NAMES: dict[str, Any] = {each.__name__: each for each in _CONTAINERS}
_SIMPLE: dict[str, Callable[..., Any]] = {
    "int": lambda digits: int(digits, 16),
    "complex": complex,
    "bytes": bytes.fromhex,
    "range": lambda *ends: range(*(int(each, 16) for each in ends)),
    "slice": slice,
    "ellipsis": lambda: Ellipsis,
    "Fraction": lambda above, below: fractions.Fraction(int(above, 16), int(below, 16)),
    "Decimal": decimal.Decimal,
    "timedelta": datetime.timedelta,
    **{name: kind.fromisoformat for name, kind in _ISO.items()},
    "type": TYPES.__getitem__,
    "module": _module,
    "array": _array_of,
}
