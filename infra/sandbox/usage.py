"""What a program uses, measured by the supervisor, for limits that the kernel itself does not enforce."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

_BLOCK = 512
_NAME = 4096
"""What a name takes up at the least."""
_THREADS = re.compile(rb"^Threads:\t(\d+)$", re.MULTILINE)
_GONE = (FileNotFoundError, ProcessLookupError)


def threads(pid: int) -> int:
    """How many threads a process has; 0 where it is gone."""
    found = _THREADS.search(_status(pid))
    return int(found.group(1)) if found else 0


def disk_bytes(folder: str, pid: int, most_a_file: int) -> int:
    """What the files take up that a program has in `folder`, which has no folders in it, named or not.

    Blocks count, not sizes. A file without a name counts while the program has it open; one that is only mapped, whose
    blocks nobody can look up, counts as `most_a_file`, the most that a file may have. Raises PermissionError where the
    kernel does not let this user look at a process that runs.
    """
    files = dict(_files_named(folder))
    total = _NAME * len(files)
    try:
        files.update(_files_open(pid))
        with open(f"/proc/{pid}/maps", "rb") as maps:
            deleted = re.findall(rb"(\d+) +" + re.escape(os.fsencode(folder)) + rb"/.* \(deleted\)\n", maps.read())
    except _GONE:
        deleted = []
    except PermissionError:
        if b"\nVmSize:" in _status(pid):  # a zombie's files belong to root
            raise
        deleted = []
    known = {inode for _, inode in files}
    return total + sum(files.values()) + most_a_file * len(set(map(int, deleted)) - known)


def _files_named(folder: str) -> Iterator[tuple[tuple[int, int], int]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # gone since
                state = entry.stat(follow_symlinks=False)
                yield (state.st_dev, state.st_ino), state.st_blocks * _BLOCK


def _files_open(pid: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Open files that have no name any more."""
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(*_GONE):
            state = os.stat(f"/proc/{pid}/fd/{name}")
            if state.st_nlink == 0:
                yield (state.st_dev, state.st_ino), state.st_blocks * _BLOCK


def _status(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            return status.read()
    except _GONE:
        return b""
