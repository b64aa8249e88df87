"""Temporary folders of processes that may be killed: the next process removes what such a process has left.

Each is locked by its process as long as that lives: a folder without a lock is that of a process that was killed.
Imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A temporary folder whose name begins with `prefix`, removed at the end.

    Those of killed processes are removed first. Raises OSError.
    """
    remove_left_folders(prefix)
    with locked_folder(prefix) as folder:
        yield folder


@contextmanager
def locked_folder(prefix: str) -> Iterator[Path]:
    """As `scratch_folder`, and those of killed processes stay."""
    folder, lock = _make_folder(prefix)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_left_folders(prefix: str) -> None:
    """Remove this user's folders with `prefix` whose processes are gone."""
    found: list[str] = []
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        found = [each.path for each in entries if each.name.startswith(prefix)]
    for path in found:
        with contextlib.suppress(OSError):  # it is in use, gone, or no folder
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.geteuid():
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _make_folder(prefix: str) -> tuple[str, int]:
    while True:
        folder = tempfile.mkdtemp(prefix=prefix)
        with contextlib.suppress(FileNotFoundError):  # removed by another process before it was locked
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # a file system without locks: then none is found left
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.exists(folder):
                return folder, lock
            os.close(lock)
