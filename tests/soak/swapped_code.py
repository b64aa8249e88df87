"""Replaces the code of a loaded module by that of another source, in place: its importers then run the new code.

A test process that has loaded everything can so be forked and given a mutant, without importing again.
"""

from __future__ import annotations

import sys
from functools import cached_property
from importlib.machinery import SourceFileLoader
from types import CodeType, FunctionType, ModuleType
from typing import Any


class _Source(SourceFileLoader):
    """Loads `module` from `source` instead of its file."""

    def __init__(self, module: ModuleType, source: str) -> None:
        super().__init__(module.__name__, str(module.__file__))
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._source.encode(), self.path)


def swap_code(module: ModuleType, source: str) -> None:
    """Make `module` behave as `source`. Raises what the execution of `source` raises.

    Functions, methods and their defaults are changed in place; so are dictionaries. Other module-level values are
    replaced under their name in every module that has imported them.
    """
    other = ModuleType(module.__name__)
    other.__file__ = module.__file__
    loaded = sys.modules[module.__name__]
    sys.modules[module.__name__] = other  # dataclasses look their module up
    try:
        _Source(module, source).exec_module(other)
    finally:
        sys.modules[module.__name__] = loaded
    for name, new in vars(other).items():
        old = vars(module).get(name)
        if new is old:  # imported
            continue
        if getattr(new, "__module__", None) == module.__name__ and isinstance(new, type | FunctionType):
            _swap(old, new)
        elif isinstance(new, dict) and isinstance(old, dict) and not name.startswith("__"):
            old.clear()
            old.update(new)
        elif not name.startswith("__") and not isinstance(new, ModuleType | type | FunctionType):
            _replace(name, old, new)


def _swap(old: Any, new: Any) -> None:
    """Give the function or class `old` the code of `new`."""
    if isinstance(new, type):
        for name, member in vars(new).items():
            if name in vars(old):
                _swap(vars(old)[name], member)
    elif isinstance(new, property):
        for kind in ("fget", "fset"):
            _swap(getattr(old, kind), getattr(new, kind))
    elif isinstance(new, cached_property):
        _swap(old.func, new.func)
    elif isinstance(new, staticmethod | classmethod) or hasattr(new, "__wrapped__"):
        _swap(old.__wrapped__, new.__wrapped__)
    elif isinstance(new, FunctionType):
        old.__code__, old.__defaults__, old.__kwdefaults__ = new.__code__, new.__defaults__, new.__kwdefaults__


def _replace(name: str, old: object, new: object) -> None:
    """Bind `new` to `name` wherever `old` is bound to it."""
    for module in list(sys.modules.values()):
        if module is not None and vars(module).get(name, _MISSING) is old:
            setattr(module, name, new)


_MISSING = object()
