"""A cgroup for each program below one that the operator delegates: the kernel counts memory and threads.

It is not needed for the guarantees, since a program is one process; with it the limit of threads is exact for root,
too, and kernel memory counts. Source: Documentation/admin-guide/cgroup-v2.rst of Linux.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Mapping
from pathlib import Path

from infra.sandbox.zygotes import SandboxUnavailable

VARIABLE = "LAMINAR_SANDBOX_CGROUP"
"""The environment variable that names the delegated cgroup's folder."""
_CONTROLLERS = {"memory", "pids"}
_END_S = 10.0
_numbers = itertools.count()


class ProgramCgroup:
    """A cgroup below `parent` with these limits (file: value). Processes that write "0" to `joining` enter it."""

    def __init__(self, parent: Path, limits: Mapping[str, int]) -> None:
        """Raises SandboxUnavailable where `parent` does not permit it."""
        self.folder = parent / f"laminar-{os.getpid()}-{next(_numbers)}"
        try:
            self.folder.mkdir()
            for name, value in limits.items():
                (self.folder / name).write_text(str(value))
            self.joining = os.open(self.folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            with contextlib.suppress(OSError):
                self.folder.rmdir()
            raise SandboxUnavailable(f"{VARIABLE}={parent}: {error}; delegate a cgroup to this user") from error

    def close(self) -> None:
        """Kill the remaining processes and remove the cgroup."""
        os.close(self.joining)
        with contextlib.suppress(FileNotFoundError, PermissionError):  # cgroup v1 has no such file
            (self.folder / "cgroup.kill").write_text("1")
        end = time.monotonic() + _END_S
        while time.monotonic() < end:
            try:
                self.folder.rmdir()
                return
            except OSError:  # a process that has exited is still in it
                time.sleep(0.001)


def program_cgroup(memory_bytes: int, threads: int) -> ProgramCgroup | None:
    """A cgroup for one program and its monitor, or None if the operator delegates none.

    Raises SandboxUnavailable if the delegated cgroup cannot limit memory and threads.
    """
    if not (named := os.environ.get(VARIABLE)):
        return None
    parent = Path(named)
    try:
        enabled = set((parent / "cgroup.subtree_control").read_text().split())
    except OSError as error:
        raise SandboxUnavailable(f"{VARIABLE}={named} is not a cgroup v2: {error}") from error
    if missing := sorted(_CONTROLLERS - enabled):
        raise SandboxUnavailable(
            f"{VARIABLE}={named} does not delegate {' and '.join(missing)}: write "
            f"'{' '.join(f'+{each}' for each in missing)}' to its cgroup.subtree_control"
        )
    limits = {"memory.max": memory_bytes, "pids.max": threads + 1}
    if (parent / "memory.swap.max").exists():
        limits["memory.swap.max"] = 0
    return ProgramCgroup(parent, limits)
