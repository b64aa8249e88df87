"""WeightStore: the complete weight versions of a machine, and the one that is being written.

Invariant 4 is enforced here: a version is visible only when all its bytes are written and hashed, and a reader has the
complete version until it releases it, or none. A version is a file that appears by one rename and never changes. A
reader's pin is a shared lock on that file, so a killed reader pins nothing; evicting needs the exclusive lock.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from infra.closing import ClosedAtExit
from infra.store import locks, names
from infra.store.errors import StoreBusy, StoreError, VersionExists, VersionGone
from infra.store.incoming_version import IncomingVersion, Seal, VersionMemory, read_seal
from infra.store.ownership import open_folder, read_marks
from schemas.records import PolicyVersion

log = logging.getLogger(__name__)

DEFAULT_KEEP = 4


def versions_to_evict(
    versions: Sequence[PolicyVersion], live_versions: Sequence[PolicyVersion], keep: int
) -> list[PolicyVersion]:
    """Of the complete `versions` those to evict, so that `keep` remain.

    The newest two are kept, then `live_versions` in their order, then the newest of the others.
    """
    newest = sorted(versions, reverse=True)
    first = newest[: min(2, keep)]
    rank = {version: place for place, version in enumerate(live_versions)}
    kept = [*first, *sorted(newest[len(first) :], key=lambda version: rank.get(version, len(rank)))][:keep]
    return [version for version in newest if version not in kept]


def is_wanted(
    version: PolicyVersion, stored: Sequence[PolicyVersion], live_versions: Sequence[PolicyVersion], keep: int
) -> bool:
    """Whether a store with the versions `stored` should fetch `version`: it is the newest, or live
    and would not cause the eviction of a live version.
    """
    if version in stored or not stored or version > max(stored):
        return version not in stored
    if version not in live_versions:
        return False
    evicted = {
        *versions_to_evict([*stored, version], live_versions, keep),
        *versions_to_evict(stored, live_versions, max(1, keep - 1)),
    }
    return evicted.isdisjoint(live_versions)


class WeightStore(ClosedAtExit):
    """The store in folder `root`, which is created if necessary; it keeps `keep` versions.

    Any number of processes may have it open; one of them writes. Raises StoreError for another user's folder.
    """

    def __init__(self, root: Path, keep: int = DEFAULT_KEEP) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        self.root = Path(root)
        self.keep = keep
        self._user_lock = open_folder(self.root)
        self._marks = read_marks(self.root)
        self._writer_lock: locks.FileLock | None = None
        self._incoming: IncomingVersion | None = None
        self._spare: VersionMemory | None = None

    # Reading.

    def versions(self) -> list[PolicyVersion]:
        """The complete versions, newest first; empty if the store was removed."""
        try:
            with os.scandir(self.root) as entries:
                found = (names.version_of(entry.name) for entry in entries)
                return sorted((version for version in found if version is not None), reverse=True)
        except FileNotFoundError:
            return []

    def create_if_removed(self) -> bool:
        """Create the store again, empty, if its folder or all in it was removed; returns whether it was.

        It stays that of its run. Raises as the constructor.
        """
        if self._user_lock.is_at(self.root / names.USERS):
            return False
        removed, self._user_lock = self._user_lock, open_folder(self.root)
        removed.release()
        self._marks.write(self.root)
        return True

    def newest(self) -> PolicyVersion | None:
        """The newest complete version, None before the first."""
        return max(self.versions(), default=None)

    def path(self, version: PolicyVersion) -> Path:
        """The file of a version; it may be evicted at any time unless pinned. Raises VersionGone."""
        path = self._file(version)
        if not path.is_file():
            raise VersionGone(f"{self.root} holds no version {version}{self._others()}")
        return path

    def seal(self, version: PolicyVersion) -> Seal:
        """Size and blake3 of a complete version. Raises VersionGone."""
        self.path(version)
        return read_seal(self.root, version)

    @contextmanager
    def pin(self, version: PolicyVersion, blake3: str | None = None) -> Iterator[Path]:
        """The file of a version, which is not evicted during the `with` block. A killed process pins nothing.

        Raises VersionGone if the store does not have the version or, given the `blake3` of a manifest, other bytes.
        """
        path = self._file(version)
        try:
            lock = locks.lock_shared(path)
        except FileNotFoundError as error:
            raise VersionGone(f"{self.root} holds no version {version}{self._others()}") from error
        try:
            if blake3 is not None and (held := read_seal(self.root, version).blake3) != blake3:
                raise VersionGone(f"{self.root} holds another version {version}: blake3 {held}, wanted {blake3}")
            yield path
        finally:
            lock.release()

    @contextmanager
    def read(self, version: PolicyVersion, blake3: str | None = None) -> Iterator[memoryview]:
        """The bytes of a version, pinned and mapped. Raises as `pin`; BufferError if a view outlives the block."""
        with self.pin(version, blake3) as path, mapped(path) as data:
            yield data

    def open_delta(self, version: PolicyVersion) -> memoryview | None:
        """The delta from the parent of this version, mapped; None if there is none."""
        try:
            return open_mapped(self._delta(version))
        except FileNotFoundError:
            return None

    def live_versions(self) -> list[PolicyVersion]:
        """The versions to evict last, as written by the machine's relay."""
        try:
            return [
                PolicyVersion.parse(text) for text in json.loads((self.root / names.LIVE).read_text(encoding="utf-8"))
            ]
        except (OSError, ValueError, TypeError):
            return []

    # Writing.

    def write_live_versions(self, versions: Iterable[PolicyVersion]) -> None:
        """Write the versions that `evict` removes last, the most needed first. Any process may write them.

        On a full disk the list stays as it is, with a warning. Raises StoreError if the store was removed.
        """
        partial_file = self.root / f"{names.LIVE}{names.PARTIAL}"
        try:
            partial_file.write_text(json.dumps(list(map(str, versions))), encoding="utf-8")
            partial_file.replace(self.root / names.LIVE)
        except FileNotFoundError as error:
            raise StoreError(f"{self.root} was removed") from error
        except OSError as error:
            log.warning("the list of versions that are evicted last cannot be written: %s", error)

    def add_delta(self, version: PolicyVersion, data: bytes) -> None:
        """Store the delta of a stored version, until that version is evicted. Raises StoreError."""
        partial_file = self.root / f"{version}{names.PARTIAL}"
        try:
            with partial_file.open("xb") as file:
                file.write(data)
            partial_file.replace(self._delta(version))
        except OSError as error:
            partial_file.unlink(missing_ok=True)
            raise StoreError(f"the delta of version {version} cannot be stored: {error}") from error

    def begin(self, version: PolicyVersion, size: int) -> IncomingVersion:
        """Start writing a new version of `size` bytes.

        The first call makes this process the store's writer until `release_writer` or `close`, and removes the partial
        files of a killed writer. Raises NoRoom before anything is copied, VersionExists, and StoreBusy while another
        process writes or a version is still being written.
        """
        self._become_writer()
        if self._incoming is not None:
            raise StoreBusy(f"version {self._incoming.version} is still being written: seal or abort it first")
        if self._file(version).exists():
            raise VersionExists(
                f"{self.root} already has version {version}: if it is from an earlier run, remove that run's store"
            )
        partial = self.root / f"{version}{names.PARTIAL}"
        memory = self._take_spare(size)
        if memory is None:
            memory = self._memory(partial, size)
        else:
            memory.rename(partial)
        self._incoming = IncomingVersion(version, memory, self._on_incoming_closed)
        return self._incoming

    def reserve(self, size: int) -> None:
        """Reserve memory for a version of `size` bytes, so that the next `begin` of that size is immediate.

        Raises NoRoom, and StoreBusy while another process writes.
        """
        self._become_writer()
        if self._spare is not None and self._spare.size == size:
            return
        self._drop_spare()
        memory = self._memory(self.root / names.SPARE, size)
        memory.prefault()
        self._spare = memory

    def evict(self, keep: int | None = None) -> list[PolicyVersion]:
        """Evict all but `keep` versions, but never the newest or a pinned one; return those evicted."""
        keep = max(self.keep if keep is None else keep, 1)
        versions = self.versions()
        if len(versions) <= keep:
            return []
        return [version for version in versions_to_evict(versions, self.live_versions(), keep) if self._remove(version)]

    def release_writer(self) -> None:
        """Stop being the store's writer until the next `begin`: another process may write meanwhile.

        Reserved memory is kept until another process writes; see `drop_lost_spare`.
        """
        if self._incoming is None and self._writer_lock is not None:
            self._writer_lock.release()
            self._writer_lock = None

    def drop_lost_spare(self) -> None:
        """Release reserved memory whose file another writer has removed."""
        if self._spare is not None and not self._spare.exists():
            self._drop_spare()

    def close(self) -> None:
        """Abort the version being written and close the store; complete versions stay."""
        if self._incoming is not None:
            self._incoming.abort()
        self._drop_spare()
        if self._writer_lock is not None:
            self._writer_lock.release()
            self._writer_lock = None
        self._user_lock.release()

    def _others(self) -> str:
        return f"; it has {', '.join(map(str, self.versions())) or 'none'}"

    def _file(self, version: PolicyVersion) -> Path:
        return self.root / names.weight_file(version)

    def _delta(self, version: PolicyVersion) -> Path:
        return self.root / f"{version}{names.DELTA}"

    def _become_writer(self) -> None:
        path = self.root / names.WRITER
        if self._writer_lock is not None:
            if self._writer_lock.is_at(path):
                return
            self._writer_lock.release()  # the store was removed, and may be another one by now
            self._writer_lock = None
        try:
            writer = locks.try_lock_exclusive(path, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError as error:
            raise StoreError(f"{self.root} was removed") from error
        if writer is None:
            pid = path.read_text(encoding="utf-8") or "unknown"
            raise StoreBusy(f"process {pid} writes to {self.root}: stop it, or give this run another name")
        os.ftruncate(writer.fd, 0)
        os.pwrite(writer.fd, str(os.getpid()).encode(), 0)
        self._writer_lock = writer
        self.drop_lost_spare()
        for path in names.orphans(self.root):
            if self._spare is None or path != self._spare.path:
                path.unlink(missing_ok=True)

    def _memory(self, path: Path, size: int) -> VersionMemory:
        try:
            return VersionMemory(path, size)
        except FileNotFoundError as error:
            raise StoreError(f"{self.root} was removed") from error

    def _take_spare(self, size: int) -> VersionMemory | None:
        spare = self._spare
        if spare is None or spare.size != size or not spare.exists():
            self._drop_spare()
            return None
        self._spare = None
        return spare

    def _drop_spare(self) -> None:
        if self._spare is not None:
            self._spare.remove()
            self._spare = None

    def _on_incoming_closed(self) -> None:
        self._incoming = None

    def _remove(self, version: PolicyVersion) -> bool:
        """Evict a version unless a reader has pinned it; return whether it was evicted."""
        path = self._file(version)
        try:
            lock = locks.try_lock_exclusive(path)
        except FileNotFoundError:  # another process has removed it
            return False
        if lock is None:
            return False
        # The seal last: a reader that sees the weights must find it.
        path.unlink(missing_ok=True)
        self._delta(version).unlink(missing_ok=True)
        (self.root / f"{version}{names.SIDECAR}").unlink(missing_ok=True)
        lock.release()
        return True


def open_mapped(path: Path) -> memoryview:
    """The bytes of a file, mapped read-only while the view is referenced. Raises FileNotFoundError."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


@contextmanager
def mapped(path: Path) -> Iterator[memoryview]:
    """The bytes of a file, mapped read-only until the `with` block ends."""
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory,
        memoryview(memory) as view,
    ):
        yield view
