"""Stand-ins for small packages that settings and the weight store need, for machines with only torch and transformers.

Checksums then have other values, and their speed is another; both are outside of what this benchmark measures.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import make_dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np


def install_missing() -> list[str]:
    """Put a stand-in in the place of each package that is not installed, and return their names."""
    missing = [name for name in _MAKERS if importlib.util.find_spec(name) is None]
    for name in missing:
        sys.modules[name] = _MAKERS[name]()
    return missing


class _Hash:
    """The methods of blake3's hasher that the store calls. The digest is a sum of words: as fast as memory is read."""

    AUTO = -1

    def __init__(self, data: Any = b"", *, max_threads: int = 1) -> None:
        self.reset()
        self.update(data)

    def update(self, data: Any) -> None:
        """Add `data`."""
        given = np.frombuffer(data, np.uint8)
        self._bytes += len(given)
        if self._rest.size or given.size % 8:
            given = np.concatenate((self._rest, given))
            self._rest = given[given.size // 8 * 8 :]
            given = given[: given.size // 8 * 8]
        self._sum += int(given.view(np.uint64).sum(dtype=np.uint64))

    def hexdigest(self) -> str:
        """The digest so far."""
        total = self._sum + int.from_bytes(self._rest.tobytes(), "little")
        return hashlib.sha256(f"{total} {self._bytes}".encode()).hexdigest()

    def reset(self) -> None:
        """Forget all data."""
        self._sum, self._bytes, self._rest = 0, 0, np.empty(0, np.uint8)


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)  # transformers looks for it
    module.__dict__.update(members)
    return module


def _crc(data: Any, before: int = 0) -> int:
    return int(_Hash(data).hexdigest()[:8], 16) ^ before


def _psutil() -> ModuleType:
    return _module("psutil", virtual_memory=_memory, Process=_process)


def _memory() -> SimpleNamespace:
    lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    kilobytes = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    return SimpleNamespace(available=kilobytes["MemAvailable"] * 1024, total=kilobytes["MemTotal"] * 1024)


def _process(pid: int | None = None) -> SimpleNamespace:
    started = Path(f"/proc/{pid or os.getpid()}").stat().st_ctime
    return SimpleNamespace(create_time=lambda: started)


def _annotated_types() -> ModuleType:
    """Its marks of bounds and conditions, each with one field."""
    fields = {"Ge": "ge", "Gt": "gt", "Le": "le", "Lt": "lt", "Predicate": "func"}
    return _module(
        "annotated_types", **{name: make_dataclass(name, [field], frozen=True) for name, field in fields.items()}
    )


_MAKERS: dict[str, Callable[[], ModuleType]] = {
    "annotated_types": _annotated_types,
    "blake3": lambda: _module("blake3", blake3=_Hash),
    "crc32c": lambda: _module("crc32c", crc32c=_crc),
    "psutil": _psutil,
}
