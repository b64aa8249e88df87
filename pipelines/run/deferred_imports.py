"""Parts of the roles' libraries that no role uses: they are imported when they are first used, not at a run's start.

A task of reasoning_gym imports cellpylib, which imports matplotlib: a tenth of the CPU time of a start.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

UNUSED = ("cellpylib",)


def defer_imports(names: Iterable[str] = UNUSED) -> None:
    """Let imports of these top-level modules find stand-ins, unless they are imported already or not installed."""
    for name in names:
        spec = None if name in sys.modules else importlib.util.find_spec(name)
        if spec is not None:
            sys.modules[name] = DeferredModule(name, spec.origin)


class DeferredModule(ModuleType):
    """Stands for a module until an attribute that it lacks is used, and then imports the module in its place.

    It has `__file__`, which `inspect` reads of every module; importlib's own LazyLoader would import the module then.
    """

    def __init__(self, name: str, origin: str | None) -> None:
        super().__init__(name)
        self.__file__ = origin

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # the path is read to import a module of the package
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)
