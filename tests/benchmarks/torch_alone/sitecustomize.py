"""Read by Python at its start if on PYTHONPATH: the packages in BLOCKED_PACKAGES are as if not installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_BLOCKED = frozenset(os.environ.get("BLOCKED_PACKAGES", "").split(","))


class _Finder(PathFinder):
    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if fullname.partition(".")[0] in _BLOCKED else super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = _Finder
