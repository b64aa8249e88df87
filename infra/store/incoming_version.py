"""A version on its way into the store: memory to fill, seen by nobody until it is sealed."""

from __future__ import annotations

import errno
import json
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import psutil
from blake3 import blake3

from infra.store import names
from infra.store.errors import CorruptVersion, NoRoom, StoreError, VersionGone
from schemas.records import PolicyVersion

_PAGE = mmap.PAGESIZE
_THREADED = 32 << 20
"""Bytes from which hashing in several threads pays."""


@dataclass(frozen=True, slots=True)
class Seal:
    """What a complete version's bytes are: how many, and their blake3 (hex)."""

    version: PolicyVersion
    bytes: int
    blake3: str


class VersionMemory:
    """Writable memory of exactly `size` bytes behind a new file, every page of it there before anyone copies.

    Raises NoRoom, leaving nothing behind, if the file system or the machine's memory cannot hold it. Without this a
    full file system would end the process that copies with SIGBUS.
    """

    def __init__(self, path: Path, size: int) -> None:
        if size < 1:
            raise ValueError(f"a version has at least one byte, not {size}")
        self.path, self.size = path, size
        free = free_bytes(path.parent)
        if size > free:
            raise NoRoom(
                f"{path.parent} has room for {free} bytes, {size} are needed: keep fewer versions, or enlarge it"
            )
        self._file = path.open("xb+", buffering=0)
        try:
            os.posix_fallocate(self._file.fileno(), 0, size)
            self.map = mmap.mmap(self._file.fileno(), size)
        except OSError as error:
            self._file.close()
            path.unlink()
            if error.errno in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT):
                raise NoRoom(f"{path.parent} cannot hold {size} bytes more: {error.strerror}") from error
            raise

    def touch(self) -> None:
        """Map every page now, so that a later copy is nothing but a copy. Lets other threads run meanwhile."""
        np.frombuffer(self.map, np.uint8)[::_PAGE] = 0

    def read_only_view(self) -> memoryview:
        """The same memory for reading alone; it may outlive all else."""
        return memoryview(mmap.mmap(self._file.fileno(), self.size, access=mmap.ACCESS_READ))

    def is_there(self) -> bool:
        """Whether the file still has its name: another process may have removed it, and put another in its place."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False

    def rename(self, path: Path) -> None:
        """Give the file another name."""
        self.path = self.path.rename(path)

    def finish(self) -> None:
        """Make the file, which is mapped no more, durable and read-only."""
        os.fsync(self._file.fileno())  # costs nothing in memory
        os.fchmod(self._file.fileno(), 0o400)
        self._file.close()

    def drop(self) -> None:
        """Remove the file, if it is still this one; the memory lives until the last view of it is gone."""
        if self._file.closed or self.is_there():
            self.path.unlink(missing_ok=True)
        self._file.close()


class IncomingVersion:
    """Version `version`, being written: fill `view`, then `seal`. Leaving its `with` block unsealed aborts it."""

    def __init__(self, version: PolicyVersion, memory: VersionMemory, on_end: Callable[[], None]) -> None:
        self.version = version
        self.view = memoryview(memory.map)
        self._memory = memory
        self._on_end = on_end
        self._open = True
        self._hasher = blake3(max_threads=blake3.AUTO if memory.size >= _THREADED else 1)
        self._hashed = 0

    def read_only_view(self) -> memoryview:
        """The same bytes for others to read while they come."""
        return self._memory.read_only_view()

    @property
    def hashed(self) -> int:
        """Bytes that are hashed already."""
        return self._hashed

    def hash_to(self, end: int) -> None:
        """Hash the bytes before `end`, which change no more: the seal is then so much quicker."""
        if end > self._hashed:
            self._hasher.update(self.view[self._hashed : end])
            self._hashed = end

    def digest(self) -> str:
        """The blake3 of what was absorbed."""
        return self._hasher.hexdigest()

    def reset_hash(self) -> None:
        """Hash from the beginning again: the bytes are to be written anew."""
        self._hasher.reset()
        self._hashed = 0

    @property
    def size(self) -> int:
        return self._memory.size

    def seal(self, expected: str | None = None) -> Seal:
        """Hash the bytes and make the version visible, whole, in one step.

        Raises CorruptVersion if their blake3 is not `expected`, BufferError if a view of them is still held (somebody
        could go on writing), StoreError if the store was removed; the version is then aborted.
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
            # The seal first: whoever sees the weights finds it.
            write_seal(root, seal)
            self._memory.rename(root / names.weight_file(self.version))
        except FileNotFoundError as error:
            self.abort()
            raise StoreError(f"the store was removed while version {self.version} arrived: {error}") from error
        except BaseException:
            self.abort()
            raise
        self._end()
        return seal

    def abort(self) -> None:
        """Give the version up; nothing of it stays. Does nothing once it is sealed or aborted."""
        if self._open:
            self._memory.drop()
            self._end()

    def __enter__(self) -> IncomingVersion:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _unmap(self) -> None:
        try:
            self.view.release()
            self._memory.map.close()
        except BufferError as error:
            raise BufferError(
                f"a view of version {self.version}'s bytes is still held; drop it before the seal"
            ) from error

    def _end(self) -> None:
        self._open = False
        self._on_end()


def free_bytes(folder: Path) -> int:
    """Bytes that a new file in `folder` may take: what its file system has free and, in shared memory, the machine."""
    state = os.statvfs(folder)
    free = state.f_bavail * state.f_frsize
    if names.SHARED_MEMORY.is_dir() and folder.stat().st_dev == names.SHARED_MEMORY.stat().st_dev:
        free = min(free, psutil.virtual_memory().available)
    return free


def write_seal(root: Path, seal: Seal) -> None:
    """Put the seal of a version into the store."""
    text = json.dumps({"version": str(seal.version), "bytes": seal.bytes, "blake3": seal.blake3})
    with (root / f"{seal.version}{names.SIDECAR}").open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_seal(root: Path, version: PolicyVersion) -> Seal:
    """The seal of a version. Raises VersionGone if there is none that can be read."""
    try:
        fields = json.loads((root / f"{version}{names.SIDECAR}").read_text(encoding="utf-8"))
        seal = Seal(PolicyVersion.parse(fields["version"]), int(fields["bytes"]), str(fields["blake3"]))
    except FileNotFoundError as error:
        raise VersionGone(f"{root} holds no version {version}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise VersionGone(f"the seal of version {version} in {root} cannot be read: {error!r}") from error
    if seal.version != version:
        raise VersionGone(f"the seal of version {version} in {root} is that of {seal.version}")
    return seal
