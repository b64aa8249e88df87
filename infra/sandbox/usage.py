"""Resource use of a program, measured by the supervisor for limits that the kernel does not enforce."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

_BLOCK = 512
_NAME = 4096
"""Minimum of bytes counted for a directory entry."""
_THREADS = re.compile(rb"^Threads:\t(\d+)$", re.MULTILINE)
_GONE = (FileNotFoundError, ProcessLookupError)


def threads(pid: int) -> int:
    """The number of threads of a process; 0 if it has ended."""
    found = _THREADS.search(_status(pid))
    return int(found.group(1)) if found else 0


def disk_bytes(folder: str, pid: int, max_file_bytes: int) -> int:
    """Disk bytes of the program's files in `folder`, which has no subfolders, unlinked files included.

    Blocks count, not sizes. An unlinked file counts while the program has it open; one that is only mapped, whose
    blocks cannot be read, counts as `max_file_bytes`, the maximum of a file. Raises PermissionError if the kernel does
    not let this user inspect the running process.
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
    return total + sum(files.values()) + max_file_bytes * len(set(map(int, deleted)) - known)


def _files_named(folder: str) -> Iterator[tuple[tuple[int, int], int]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                state = entry.stat(follow_symlinks=False)
                yield (state.st_dev, state.st_ino), state.st_blocks * _BLOCK


def _files_open(pid: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Open files that are unlinked."""
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
