"""The working folders of programs where the zygote has no namespaces. Imports nothing but the standard library.

Each is locked by its supervisor as long as it lives: a folder without a lock is that of a supervisor that was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator

_PREFIX = "laminar-sandbox-"


@contextlib.contextmanager
def program_folder() -> Iterator[str]:
    """A new folder for one program, removed afterwards. Raises OSError."""
    folder, lock = _locked_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_left_folders() -> None:
    """Remove this user's folders whose supervisors are gone."""
    found: list[str] = []
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        found = [each.path for each in entries if each.name.startswith(_PREFIX)]
    for path in found:
        with contextlib.suppress(OSError):  # it is in use, or gone
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.getuid():
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _locked_folder() -> tuple[str, int]:
    while True:
        folder = tempfile.mkdtemp(prefix=_PREFIX)
        with contextlib.suppress(FileNotFoundError):  # removed by another supervisor before it was locked
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # a file system without locks: then none is found left
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.exists(folder):
                return folder, lock
            os.close(lock)
