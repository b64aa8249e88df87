"""Hides modules that a library imports if they are installed, for parts of it that Laminar does not use."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from types import ModuleType

OPTIONAL = ("pandas",)
"""Beam imports it, which takes a second, for data frames alone; pyarrow at the first conversion of each process."""


@contextmanager
def hidden_modules(names: Iterable[str] = OPTIONAL) -> Iterator[None]:
    """A context in which these modules cannot be imported, as if they were not installed, unless they are already."""
    finder = hide_modules(names)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def hide_modules(names: Iterable[str], reason: str = "") -> MetaPathFinder:
    """Hide these modules until the finder that is returned leaves `sys.meta_path`; `reason` is in the error."""
    finder = _HidesModules(frozenset(names), reason)
    sys.meta_path.insert(0, finder)
    return finder


@dataclass(eq=False)
class _HidesModules(MetaPathFinder):
    """Finds no module of `names`. None in sys.modules would hide them from Python, but not from Cython."""

    names: Collection[str]
    reason: str

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name in self.names:
            message = f"{name} {self.reason}" if self.reason else f"No module named {name!r}"
            raise ModuleNotFoundError(message, name=name)
