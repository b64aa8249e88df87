"""A version that is being written to the store: memory to fill, not visible to readers until it is sealed."""

from __future__ import annotations

import errno
import json
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3

from infra.memory import usable_memory
from infra.store import names
from infra.store.errors import CorruptVersion, NoRoom, StoreError, VersionGone
from schemas.records import PolicyVersion

_PAGE = mmap.PAGESIZE
_PARALLEL_HASH_BYTES = 32 << 20
"""Size from which hashing in several threads is faster."""


@dataclass(frozen=True, slots=True)
class Seal:
    """The size and blake3 (hex) of a complete version."""

    version: PolicyVersion
    bytes: int
    blake3: str


class VersionMemory:
    """Writable memory of exactly `size` bytes backed by a new file, with all pages allocated before anything is copied.

    Raises NoRoom and removes the file if the file system or the machine's memory is too small. Without allocation a
    full file system would kill the copying process with SIGBUS.
    """

    def __init__(self, path: Path, size: int) -> None:
        if size < 1:
            raise ValueError(f"the size of a version must be at least 1 byte, not {size}")
        self.path, self.size = path, size
        free = free_bytes(path.parent)
        if size > free:
            raise NoRoom(f"{path.parent} has {free} bytes free, {size} are needed: keep fewer versions or enlarge it")
        self._file = path.open("xb+", buffering=0)
        self._stat = os.fstat(self._file.fileno())
        try:
            os.posix_fallocate(self._file.fileno(), 0, size)
            self.map = mmap.mmap(self._file.fileno(), size)
        except OSError as error:
            self._file.close()
            path.unlink()
            if error.errno in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT):
                raise NoRoom(f"{path.parent} cannot store {size} more bytes: {error.strerror}") from error
            raise

    def prefault(self) -> None:
        """Fault all pages in, so that a later copy causes no page faults. Other threads can run meanwhile."""
        np.frombuffer(self.map, np.uint8)[::_PAGE] = 0

    def read_only_view(self) -> memoryview:
        """A read-only mapping of the same memory; it stays valid after this object is closed."""
        return memoryview(mmap.mmap(self._file.fileno(), self.size, access=mmap.ACCESS_READ))

    def exists(self) -> bool:
        """Whether the path still refers to this file: another process may have removed or replaced it."""
        try:
            return os.path.samestat(self._stat, self.path.stat())
        except FileNotFoundError:
            return False

    def rename(self, path: Path) -> None:
        """Rename the file."""
        self.path = self.path.rename(path)

    def finish(self) -> None:
        """Make the file durable and read-only; it must be unmapped."""
        os.fsync(self._file.fileno())  # free of cost in shared memory
        os.fchmod(self._file.fileno(), 0o400)
        self._file.close()

    def remove(self) -> None:
        """Remove the file if the path still refers to it; the memory is freed with its last view."""
        if self.exists():
            self.path.unlink(missing_ok=True)
        self._file.close()


class IncomingVersion:
    """A version being written: fill `view`, then call `seal`; leaving the `with` block unsealed aborts it."""

    def __init__(self, version: PolicyVersion, memory: VersionMemory, on_close: Callable[[], None]) -> None:
        self.version = version
        self.view = memoryview(memory.map)
        self._memory = memory
        self._on_close = on_close
        self._open = True
        self._hasher = blake3(max_threads=blake3.AUTO if memory.size >= _PARALLEL_HASH_BYTES else 1)
        self._hashed = 0

    def read_only_view(self) -> memoryview:
        """A read-only view of the bytes for readers while they arrive."""
        return self._memory.read_only_view()

    @property
    def path(self) -> Path:
        """The file, which other processes may map to write parts of it; see `infra/store/names.py`."""
        return self._memory.path

    @property
    def hashed(self) -> int:
        """Number of bytes hashed so far."""
        return self._hashed

    def hash_to(self, end: int) -> None:
        """Hash the bytes before `end`, which must not change any more; this shortens `seal`."""
        if end > self._hashed:
            self._hasher.update(self.view[self._hashed : end])
            self._hashed = end

    def digest(self) -> str:
        """The blake3 of the bytes hashed so far."""
        return self._hasher.hexdigest()

    def reset_hash(self) -> None:
        """Restart the hash: the bytes will be rewritten."""
        self._hasher.reset()
        self._hashed = 0

    @property
    def size(self) -> int:
        return self._memory.size

    def seal(self, expected: str | None = None) -> Seal:
        """Hash the bytes and make the complete version visible atomically.

        Raises CorruptVersion if the blake3 is not `expected`, BufferError if a view of the bytes is still held (its
        holder could continue to write), StoreError if the store was removed; the version is then aborted.
        """
        if not self._open:
            raise StoreError(f"version {self.version} is sealed or aborted already")
        try:
            self.hash_to(self.size)
            digest = self._hasher.hexdigest()
            if expected is not None and digest != expected:
                raise CorruptVersion(f"version {self.version} arrived with blake3 {digest}, expected {expected}")
            self._unmap()
            seal = Seal(self.version, self.size, digest)
            self._memory.finish()
            root = self._memory.path.parent
            if not self._memory.exists():  # the store may be another one by now
                raise FileNotFoundError(self._memory.path)
            # The seal first: a reader that sees the weights must find it.
            write_seal(root, seal)
            self._memory.rename(root / names.weight_file(self.version))
        except FileNotFoundError as error:
            self.abort()
            raise StoreError(f"the store was removed while version {self.version} was written: {error}") from error
        except BaseException:
            self.abort()
            raise
        self._close()
        return seal

    def abort(self) -> None:
        """Discard the version. Does nothing once it is sealed or aborted."""
        if self._open:
            self._memory.remove()
            self._close()

    def __enter__(self) -> IncomingVersion:
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()

    def _unmap(self) -> None:
        try:
            self.view.release()
            self._memory.map.close()
        except BufferError as error:
            raise BufferError(
                f"a view of the bytes of version {self.version} is still held: release it before the seal"
            ) from error

    def _close(self) -> None:
        self._open = False
        self._on_close()


def free_bytes(folder: Path) -> int:
    """Bytes available to a new file in `folder`: free on its file system and, in shared memory, in memory."""
    state = os.statvfs(folder)
    free = state.f_bavail * state.f_frsize
    if names.SHARED_MEMORY.is_dir() and folder.stat().st_dev == names.SHARED_MEMORY.stat().st_dev:
        free = min(free, usable_memory().available)
    return free


def write_seal(root: Path, seal: Seal) -> None:
    """Write the seal of a version to the store."""
    text = json.dumps({"version": str(seal.version), "bytes": seal.bytes, "blake3": seal.blake3})
    with (root / f"{seal.version}{names.SIDECAR}").open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_seal(root: Path, version: PolicyVersion) -> Seal:
    """Read the seal of a version. Raises VersionGone if it is missing or cannot be read."""
    try:
        fields = json.loads((root / f"{version}{names.SIDECAR}").read_text(encoding="utf-8"))
        seal = Seal(PolicyVersion.parse(fields["version"]), int(fields["bytes"]), str(fields["blake3"]))
    except FileNotFoundError as error:
        raise VersionGone(f"{root} holds no version {version}") from error
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise VersionGone(f"the seal of version {version} in {root} cannot be read: {error!r}") from error
    if seal.version != version:
        raise VersionGone(f"the seal of version {version} in {root} is for version {seal.version}")
    return seal
