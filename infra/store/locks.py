"""File locks that end with their holder: the kernel releases a flock when its process ends for any reason.

A lock belongs to the file, not to its path. The path may be removed or replaced while a process waits for the lock, so
each lock is checked to be on the file of that path. Locks also conflict between two descriptors of one process.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class FileLock:
    """A held lock. `release` releases it, in forked children as well; so does the end of the process."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def is_at(self, path: Path) -> bool:
        """Whether it is held, and on the file that `path` has now: with another one there, it protects nothing."""
        try:
            return self.fd >= 0 and os.path.samestat(os.fstat(self.fd), path.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            fcntl.flock(fd, fcntl.LOCK_UN)  # after closing alone, a child forked meanwhile would still hold it
            os.close(fd)


def lock_shared(path: Path) -> FileLock:
    """Acquire a shared lock; waits for an exclusive one. Raises FileNotFoundError if `path` is gone."""
    return _lock(path, os.O_RDONLY, fcntl.LOCK_SH)


def try_lock_exclusive(path: Path, flags: int = os.O_RDONLY) -> FileLock | None:
    """Acquire an exclusive lock; None if any other lock is held. Raises FileNotFoundError if `path` is gone."""
    try:
        return _lock(path, flags, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None


def _lock(path: Path, flags: int, operation: int) -> FileLock:
    lock = FileLock(os.open(path, flags | os.O_CLOEXEC, 0o600))
    try:
        fcntl.flock(lock.fd, operation)
        if not lock.is_at(path):
            raise FileNotFoundError(f"{path} was replaced")
    except BaseException:
        lock.release()
        raise
    return lock
