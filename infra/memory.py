"""The memory that this process may use: the machine's, or less where a cgroup has a limit, as that of a container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

_V2 = ("memory.max", "memory.current", "")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


class UsableMemory(NamedTuple):
    """Bytes. Page cache is available: the kernel frees it when memory is needed."""

    available: int
    total: int


def usable_memory(root: Path = Path("/")) -> UsableMemory:
    """The memory of this machine, or what the limits of this process's cgroups (v2 or v1) leave of it.

    `root` has the folders proc and sys.
    """
    machine = psutil.virtual_memory()
    available, total = machine.available, machine.total
    for limit, used in _limits(root):
        available, total = min(available, max(0, limit - used)), min(total, limit)
    return UsableMemory(available, total)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use, without page cache, of each cgroup of this process that has a limit."""
    try:
        cgroups = (root / "proc" / "self" / "cgroup").read_text()
    except OSError:
        return
    mount = root / "sys" / "fs" / "cgroup"
    for line in cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _limits_along(mount, path, *_V2)
        elif "memory" in controllers.split(","):
            yield from _limits_along(mount / "memory", path, *_V1)


def _limits_along(mount: Path, path: str, most: str, current: str, prefix: str) -> Iterator[tuple[int, int]]:
    """As `_limits`, of the cgroup `path` and those above it. In a container `mount` may be the cgroup itself."""
    names = Path(path).parts[1:]
    for depth in range(0 if ".." in names else len(names), -1, -1):
        folder = mount.joinpath(*names[:depth])
        try:
            limit, used = (int((folder / name).read_text()) for name in (most, current))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cache = sum(int(stat[f"{prefix}{state}_file"]) for state in ("active", "inactive"))
            yield limit, max(0, used - cache)
        except (OSError, ValueError, KeyError):  # "max", or no such cgroup here
            continue
