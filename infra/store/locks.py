"""Locks on files that die with their holder: the kernel drops a flock when its process ends, by whatever means.

A lock belongs to the file, not to its name: whoever waited for one may find that its name is gone by then, so each is
checked to be still the file of that name. Locks conflict between two descriptors of one process too.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class Lock:
    """A held lock. `release` lets go of it, in forked children as well; so does the end of the process."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def release(self) -> None:
        """Let go; a second call does nothing."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            fcntl.flock(fd, fcntl.LOCK_UN)  # closing alone would leave it to a child that was forked meanwhile
            os.close(fd)


def lock_shared(path: Path, flags: int = os.O_RDONLY) -> Lock:
    """A lock that others may share, waiting while one holds it alone. Raises FileNotFoundError if `path` is gone."""
    lock = Lock(os.open(path, flags | os.O_CLOEXEC, 0o600))
    try:
        fcntl.flock(lock.fd, fcntl.LOCK_SH)
        _still_there(lock.fd, path)
    except BaseException:
        lock.release()
        raise
    return lock


def try_lock_exclusive(path: Path, flags: int = os.O_RDONLY) -> Lock | None:
    """A lock of one's own, None while anybody else has one. Raises FileNotFoundError if `path` is gone."""
    lock = Lock(os.open(path, flags | os.O_CLOEXEC, 0o600))
    try:
        fcntl.flock(lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _still_there(lock.fd, path)
    except BlockingIOError:
        lock.release()
        return None
    except BaseException:
        lock.release()
        raise
    return lock


def _still_there(fd: int, path: Path) -> None:
    if not os.path.samestat(os.fstat(fd), path.stat()):
        raise FileNotFoundError(f"{path} was replaced")
