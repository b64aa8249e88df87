"""Stand-ins for three small packages that the weight store needs, for machines with only torch and transformers.

Checksums then have other values, and their speed is another; both are outside of what this benchmark measures.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import zlib
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


def install_missing() -> list[str]:
    """Put a stand-in in the place of each package that is not installed, and return their names."""
    missing = [name for name in _MAKERS if importlib.util.find_spec(name) is None]
    for name in missing:
        sys.modules[name] = _MAKERS[name]()
    return missing


class _Hash:
    """The methods of blake3's hasher that the store calls."""

    AUTO = -1

    def __init__(self, data: Any = b"", *, max_threads: int = 1) -> None:
        self._hash = hashlib.blake2b(data, digest_size=32)

    def update(self, data: Any) -> None:
        """Add `data`."""
        self._hash.update(data)

    def hexdigest(self) -> str:
        """The digest so far."""
        return self._hash.hexdigest()

    def reset(self) -> None:
        """Forget all data."""
        self._hash = hashlib.blake2b(digest_size=32)


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)  # transformers looks for it
    module.__dict__.update(members)
    return module


def _psutil() -> ModuleType:
    return _module("psutil", virtual_memory=_memory, Process=_process)


def _memory() -> SimpleNamespace:
    lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    kilobytes = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    return SimpleNamespace(available=kilobytes["MemAvailable"] * 1024, total=kilobytes["MemTotal"] * 1024)


def _process(pid: int | None = None) -> SimpleNamespace:
    started = Path(f"/proc/{pid or os.getpid()}").stat().st_ctime
    return SimpleNamespace(create_time=lambda: started)


_MAKERS: dict[str, Callable[[], ModuleType]] = {
    "blake3": lambda: _module("blake3", blake3=_Hash),
    "crc32c": lambda: _module("crc32c", crc32c=zlib.crc32),
    "psutil": _psutil,
}
