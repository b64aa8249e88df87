"""Objects of a program in another sandbox: a test uses functions and classes of an answer, which never sees the test.

A stream connects the two programs. Each refers to objects of the other by a Proxy, whose operations run where the
object is. Values of plain types are copied (remote_values.py); after a call its mutable arguments are updated with
what the call did to their copies.

A proxy is compared with a plain value here: the other program does not learn the value and cannot claim to equal it.
It does learn the operands of arithmetic, so what an answer's class computes with a test's number is no number here.
Imports nothing but the standard library: it runs inside the sandbox.
"""

from __future__ import annotations

import asyncio
import builtins
import json
import operator
import os
import struct
import symtable
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from infra.sandbox.remote_values import TYPES, Decoder, Encoder, plain

_LENGTH = struct.Struct(">I")
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_UNARY = ("neg", "pos", "abs", "invert")
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift")
_CONVERSIONS = ("index", "int", "float", "round", "bool", "len")
_ORDER = ("lt", "le", "gt", "ge")
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, arguments, named: function(*arguments, **named),
    "getattr": getattr, "setattr": setattr, "delattr": delattr, "iter": iter, "next": next, "len": len, "str": str,
    "repr": repr, "bool": bool, "hash": hash, "int": int, "float": float, "isinstance": isinstance, "divmod": divmod,
    "issubclass": issubclass, "reversed": reversed, "format": format, "round": round, "index": operator.index,
    "eq": operator.eq,
    "getitem": operator.getitem, "setitem": operator.setitem, "delitem": operator.delitem,
    "enter": lambda manager: manager.__enter__(), "exit": lambda manager: manager.__exit__(None, None, None),
    "await": lambda coroutine: asyncio.run(coroutine),
    **{name: getattr(operator, name) for name in (*_UNARY, *_BINARY, *_ORDER)},
}  # fmt: skip
_CALLABLE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)


class Disconnected(BaseException):
    """The other program has ended, or sent an invalid message. No `except Exception` of a test catches it."""


class RemotePeer:
    """This program's end of the stream `descriptor`.

    `offers` says what the other program may do to an object of this one: None allows every operation.
    """

    def __init__(self, descriptor: int, offers: Callable[[str, Any, tuple[Any, ...]], bool] | None = None) -> None:
        self._descriptor, self._offers = descriptor, offers
        self.is_test = offers is not None
        self._exported: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._imported: dict[int, Any] = {}
        self.connected = True

    def request(self, operation: str, *arguments: Any) -> Any:
        """The result of an operation in the other program, or what it raised there. Raises Disconnected."""
        encoder = Encoder(self._refer)
        given = [encoder.encode(each) for each in arguments]
        self._send({"do": operation, "arguments": given, "table": encoder.finish()})
        while True:
            message = self._receive()
            if "do" in message:
                self._serve(message)
                continue
            decoder = Decoder(self._resolve, message["table"], encoder.containers)
            if "error" in message:
                raise self._error(message["error"], decoder)
            return decoder.decode(message["result"])

    def serve(self, names: dict[str, Any]) -> None:
        """Serve requests until the other program ends. `names` are those that it may ask for."""
        self._names = names
        try:
            while True:
                self._serve(self._receive())
        except Disconnected:
            return

    def _serve(self, message: dict[str, Any]) -> None:
        decoder = Decoder(self._resolve, message["table"])
        arguments = [decoder.decode(each) for each in message["arguments"]]
        encoder = Encoder(self._refer, decoder.containers)
        try:
            reply = {"result": encoder.encode(self._perform(message["do"], arguments))}
        except Disconnected:
            raise
        except BaseException as error:  # noqa: BLE001 - it is the other program's to handle
            described = [encoder.encode(type(error)), [encoder.encode(each) for each in error.args], self._refer(error)]
            reply = {"error": described}
        self._send({**reply, "table": encoder.finish()})

    def _perform(self, operation: str, arguments: list[Any]) -> Any:
        if operation == "names":
            return list(self._names)
        if operation == "name":
            return self._names[arguments[0]]
        if self._offers and not self._offers(operation, arguments[0], tuple(arguments[1:])):
            raise PermissionError(f"a test does not offer {operation} of this object")
        return _OPERATIONS[operation](*arguments)

    def _refer(self, value: Any) -> Any:
        if isinstance(value, Proxy):
            return ["yours", value._remote_number]
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._exported)
            self._exported.append(value)  # kept, so that its id stays its own
        number = self._numbers[id(value)]
        if isinstance(value, type) and issubclass(value, BaseException):
            base = next(each for each in value.__mro__ if TYPES.get(each.__qualname__) is each)
            return ["exception", number, value.__name__, base.__qualname__]
        if isinstance(value, types.CoroutineType):
            return ["coroutine", number]
        encoder = Encoder(self._refer)
        simple = encoder.encode(plain(value)) if type(value).__mro__[1:2] != (object,) else None
        return ["mine", number, simple, encoder.finish()]

    def _resolve(self, node: list[Any]) -> Any:
        tag, number, *rest = node
        if tag == "yours":
            return self._exported[number]
        if tag == "coroutine":
            return self._await(self._import_proxy(number))
        if tag == "exception":
            if number not in self._imported:
                base = TYPES[rest[1]]
                if not issubclass(base, BaseException):
                    raise ValueError(f"{rest[1]} is no exception")
                self._imported[number] = type(str(rest[0]), (base,), {"__getattr__": _attribute_of_error})
            return self._imported[number]
        if tag != "mine":
            raise ValueError(f"no tag {tag!r}")
        proxy = self._import_proxy(number)
        object.__setattr__(proxy, "_remote_plain", Decoder(self._resolve, rest[1]).decode(rest[0]))
        return proxy

    def _import_proxy(self, number: int) -> Proxy:
        if number not in self._imported:
            self._imported[number] = Proxy(self, number)
        proxy = self._imported[number]
        if not isinstance(proxy, Proxy):
            raise ValueError("an exception's class is no object")
        return proxy

    async def _await(self, coroutine: Proxy) -> Any:
        return self.request("await", coroutine)

    def _error(self, described: list[Any], decoder: Decoder) -> BaseException:
        kind, arguments, remote = described
        made = decoder.decode(kind)
        if not isinstance(made, type) or not issubclass(made, BaseException):
            raise self._disconnected("it raised what is no exception")
        try:
            error = made(*(decoder.decode(each) for each in arguments))
        except Exception:  # noqa: BLE001 - some want other arguments than they keep
            error = made.__new__(made)
        if made not in TYPES.values():
            error.__dict__["_remote"] = decoder.decode(remote)
        return error

    def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message, separators=(",", ":")).encode()
        rest = memoryview(_LENGTH.pack(len(body)) + body)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            raise self._disconnected(str(error)) from error

    def _receive(self) -> dict[str, Any]:
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > _MAX_MESSAGE_BYTES:
            raise self._disconnected(f"a message of {length} bytes")
        try:
            message = json.loads(self._read(length))
        except ValueError as error:
            raise self._disconnected(str(error)) from error
        if not isinstance(message, dict) or "table" not in message:
            raise self._disconnected("an invalid message")
        return message

    def _read(self, count: int) -> bytes:
        read = bytearray()
        while len(read) < count:
            try:
                part = os.read(self._descriptor, count - len(read))
            except OSError as error:
                raise self._disconnected(str(error)) from error
            if not part:
                raise self._disconnected("it has ended")
            read += part
        return bytes(read)

    def _disconnected(self, why: str) -> Disconnected:
        self.connected = False
        return Disconnected(why)


def _attribute_of_error(self: BaseException, name: str) -> Any:
    """Attributes of an error of the other program, which it may have beside its arguments."""
    if name.startswith("_") or "_remote" not in self.__dict__:
        raise AttributeError(name)
    return getattr(self.__dict__["_remote"], name)


class Proxy:
    """An object of the other program. `_remote_plain` is its plain value, or None; `_remote_computed` is whether it was
    computed from a number of the test, which it has seen."""

    def __init__(self, peer: RemotePeer, number: int) -> None:
        fields = {"peer": peer, "number": number, "plain": None, "computed": False}
        for name, value in fields.items():
            object.__setattr__(self, f"_remote_{name}", value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__array"):  # numpy would take what it names for the object's numbers
            raise AttributeError(name)
        return self._remote_peer.request("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._remote_peer.request("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._remote_peer.request("delattr", self, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._remote_peer.request("call", self, arguments, named)

    def __iter__(self) -> Iterator[Any]:
        # A list's `in` and `list()` go through this, so that items are compared here.
        return self._remote_peer.request("iter", self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Proxy):
            return self is other or bool(self._remote_peer.request("eq", self, other))
        return self._remote_plain is not None and bool(self._remote_plain == other)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Proxy) and bool(self._remote_peer.request("isinstance", instance, self))

    def __subclasscheck__(self, kind: object) -> bool:
        return isinstance(kind, Proxy) and bool(self._remote_peer.request("issubclass", kind, self))

    def __exit__(self, *error: object) -> None:
        self._remote_peer.request("exit", self)


def _forward(operation: str) -> Callable[..., Any]:
    def forwarded(self: Proxy, *arguments: Any) -> Any:
        return self._remote_peer.request(operation, self, *arguments)

    return forwarded


def _is_difference(value: Any) -> bool:
    """Whether `value` could be the difference of two values: a number, a set, a time, an array. No text, no list."""
    return not isinstance(value, Proxy) and hasattr(type(value), "__sub__")


def _compute(operation: str, reflected: bool = False) -> Callable[..., Any]:
    def computed(self: Proxy, *operands: Any) -> Any:
        given = (*operands, self) if reflected else (self, *operands)
        shown = self._remote_peer.is_test and any(map(_is_difference, operands))
        if shown and _is_difference(self._remote_plain):  # its class derives from that of a number
            return _OPERATIONS[operation](*(self._remote_plain if each is self else each for each in given))
        if shown and any(hasattr(type(each), "__array__") for each in operands):
            raise TypeError(_NO_NUMBER)
        shown = shown or all(each._remote_computed for each in given if isinstance(each, Proxy))
        result = self._remote_peer.request(operation, *given)
        if shown and _is_difference(result._remote_plain if isinstance(result, Proxy) else result):
            raise TypeError(_NO_NUMBER)
        if shown and isinstance(result, Proxy):
            object.__setattr__(result, "_remote_computed", True)
        return result

    return computed


def _convert(operation: str) -> Callable[..., Any]:
    def converted(self: Proxy, *arguments: Any) -> Any:
        if self._remote_computed:
            raise TypeError(_NO_NUMBER)
        return self._remote_peer.request(operation, self, *arguments)

    return converted


_NO_NUMBER = "what an answer's class computes with a number of the test is no number: compare it with another object"


def _compare(operation: str) -> Callable[[Proxy, Any], Any]:
    def compared(self: Proxy, other: Any) -> Any:
        if isinstance(other, Proxy):
            return self._remote_peer.request(operation, self, other)
        return NotImplemented if self._remote_plain is None else _OPERATIONS[operation](self._remote_plain, other)

    return compared


for _name in ("getitem", "setitem", "delitem", "next", "str", "repr", "hash", "reversed", "format", "enter"):
    setattr(Proxy, f"__{_name}__", _forward(_name))
for _name in _CONVERSIONS:
    setattr(Proxy, f"__{_name}__", _convert(_name))
for _name in (*_UNARY, *_BINARY, "divmod"):
    setattr(Proxy, f"__{_name.strip('_')}__", _compute(_name))
for _name in _BINARY:
    setattr(Proxy, f"__r{_name.strip('_')}__", _compute(_name, reflected=True))
for _name in _ORDER:
    setattr(Proxy, f"__{_name}__", _compare(_name))


class Names(dict[str, Any]):
    """The variables of tests: their own, and the other program's names where they have none.

    Python's built-in names stay Python's, or an answer could replace what a test checks with. If tests use no other
    name of the answer, they are tests of one: `assert sum(2, 3) == 5`.
    """

    def __init__(self, peer: RemotePeer, tests: Sequence[str]) -> None:
        """Wait until the other program has its names. Raises Disconnected."""
        super().__init__(__name__="__main__", __builtins__=builtins)
        self._peer = peer
        names = frozenset(peer.request("names"))
        self._replaced = frozenset() if _names_lacking(tests) - vars(builtins).keys() else names

    def __missing__(self, name: str) -> Any:
        if name not in self._replaced and hasattr(builtins, name):
            raise KeyError(name)
        return self._peer.request("name", name)


def _names_lacking(tests: Sequence[str]) -> set[str]:
    """The global names that `tests` use, and do not define."""
    used: set[str] = set()
    defined: set[str] = set()
    for test in tests:
        try:
            tables = [symtable.symtable(test, "<test>", "exec")]
        except (SyntaxError, ValueError):  # it cannot pass
            continue
        while tables:
            table = tables.pop()
            tables += table.get_children()
            symbols = [each for each in table.get_symbols() if each.is_global()]
            used.update(each.get_name() for each in symbols if each.is_referenced())
            defined.update(each.get_name() for each in symbols if each.is_assigned() or each.is_imported())
    return used - defined


def offers(operation: str, target: Any, arguments: tuple[Any, ...]) -> bool:
    """What an answer may do to a test's objects: call functions, go through iterators, use objects of its classes.

    Nothing leads from these to the test's code or variables.
    """
    if isinstance(target, _CALLABLE):
        return operation == "call"
    if type(target).__module__ != "__main__":
        return operation in ("iter", "next", "len", "bool")
    if operation in ("getattr", "setattr", "delattr"):
        return type(arguments[0]) is str and not arguments[0].startswith("_")
    return operation != "await"
