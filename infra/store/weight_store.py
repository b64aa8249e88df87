"""WeightStore: a machine's complete weight versions, and the one that is arriving.

Invariant 4, kept here: a version is visible only when all its bytes are in place and hashed, and whoever reads one
holds it whole until they let go, or gets none. A version is a file that appears by one rename and never changes; a
reader's pin is a lock on that file, so that a killed reader pins nothing; who gets the lock alone may remove a version.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from infra.store import locks, names
from infra.store.errors import StoreBusy, StoreError, VersionExists, VersionGone
from infra.store.incoming_version import IncomingVersion, Seal, VersionMemory, read_seal
from infra.store.ownership import open_folder, remove_store
from schemas.records import PolicyVersion

DEFAULT_KEEP = 4


def versions_to_evict(
    versions: Sequence[PolicyVersion], live_versions: Collection[PolicyVersion], keep: int
) -> list[PolicyVersion]:
    """Of the complete `versions` those that go, so that `keep` stay.

    The newest two stay, then those that `live` trajectories name, then the newest of the others.
    """
    newest = sorted(versions, reverse=True)
    first = newest[: min(2, keep)]
    kept = [*first, *sorted(newest[len(first) :], key=lambda version: version not in live_versions)][:keep]
    return [version for version in newest if version not in kept]


def is_wanted(
    version: PolicyVersion, here: Sequence[PolicyVersion], live_versions: Collection[PolicyVersion], keep: int
) -> bool:
    """Whether a store that has the versions `here` should get `version`: it is the newest, or live, and no live one
    would go for it.
    """
    if version in here or not here or version > max(here):
        return version not in here
    if version not in live_versions:
        return False
    gone = {
        *versions_to_evict([*here, version], live_versions, keep),
        *versions_to_evict(here, live_versions, max(1, keep - 1)),
    }
    return gone.isdisjoint(live_versions)


class WeightStore:
    """The store in folder `root`, made if it is not there; it keeps the newest `keep` versions.

    Any number of processes may have it open; one of them writes. Raises StoreError if the folder is another user's.
    """

    def __init__(self, root: Path, keep: int = DEFAULT_KEEP) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        self.root = Path(root)
        self.keep = keep
        self._share = open_folder(self.root)
        self._writer: locks.Lock | None = None
        self._arriving: IncomingVersion | None = None
        self._spare: VersionMemory | None = None

    # Reading.

    def versions(self) -> list[PolicyVersion]:
        """The complete versions, newest first; empty once the store was removed."""
        try:
            with os.scandir(self.root) as entries:
                found = (names.version_of(entry.name) for entry in entries)
                return sorted((version for version in found if version is not None), reverse=True)
        except FileNotFoundError:
            return []

    def newest(self) -> PolicyVersion | None:
        """The newest complete version, None before the first."""
        return max(self.versions(), default=None)

    def path(self, version: PolicyVersion) -> Path:
        """The file of a version; it may be evicted at any time unless pinned. Raises VersionGone."""
        path = self._file(version)
        if not path.is_file():
            raise VersionGone(f"{self.root} holds no version {version}")
        return path

    def seal(self, version: PolicyVersion) -> Seal:
        """Size and blake3 of a complete version. Raises VersionGone."""
        self.path(version)
        return read_seal(self.root, version)

    @contextmanager
    def pin(self, version: PolicyVersion, blake3: str | None = None) -> Iterator[Path]:
        """The file of a version, which neither vanishes nor changes within the `with` block, nor after a kill leaks.

        Raises VersionGone if the store does not hold it or, given the `blake3` of a manifest, holds other bytes.
        """
        path = self._file(version)
        try:
            lock = locks.lock_shared(path)
        except FileNotFoundError as error:
            raise VersionGone(f"{self.root} holds no version {version}") from error
        try:
            if blake3 is not None and (held := read_seal(self.root, version).blake3) != blake3:
                raise VersionGone(f"{self.root} holds another version {version}: blake3 {held}, wanted {blake3}")
            yield path
        finally:
            lock.release()

    @contextmanager
    def read(self, version: PolicyVersion, blake3: str | None = None) -> Iterator[memoryview]:
        """The bytes of a version, pinned and mapped. Raises as `pin`, and BufferError if a part is still held then."""
        with self.pin(version, blake3) as path, mapped(path) as data:
            yield data

    def open_delta(self, version: PolicyVersion) -> memoryview | None:
        """The bytes that turn this version's parent into it, mapped; None where there are none."""
        try:
            return open_mapped(self._delta(version))
        except FileNotFoundError:
            return None

    def live_versions(self) -> set[PolicyVersion]:
        """The versions that live trajectories name, as far as the machine's relay has heard."""
        try:
            return {
                PolicyVersion.parse(text) for text in json.loads((self.root / names.LIVE).read_text(encoding="utf-8"))
            }
        except (OSError, ValueError, TypeError):
            return set()

    # Writing.

    def write_live_versions(self, versions: Iterable[PolicyVersion]) -> None:
        """Say which versions live trajectories name: `evict` takes them last. Any process may say it."""
        unfinished = self.root / f"{names.LIVE}{names.PARTIAL}"
        try:
            unfinished.write_text(json.dumps(sorted(map(str, versions))), encoding="utf-8")
            unfinished.replace(self.root / names.LIVE)
        except FileNotFoundError as error:
            raise StoreError(f"{self.root} was removed") from error

    def add_delta(self, version: PolicyVersion, data: bytes) -> None:
        """Keep the delta of a version that is there, as long as the version is kept. Raises StoreError."""
        unfinished = self.root / f"{version}{names.PARTIAL}"
        try:
            with unfinished.open("xb") as file:
                file.write(data)
            unfinished.replace(self._delta(version))
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise StoreError(f"the delta of version {version} cannot be kept: {error}") from error

    def begin(self, version: PolicyVersion, size: int) -> IncomingVersion:
        """Memory for `size` bytes of a new version.

        The first call makes this process the store's writer until `close`, and removes what a killed one left. Raises
        NoRoom before anything is copied, VersionExists, and StoreBusy while another process writes or a version is
        still arriving.
        """
        self._become_writer()
        if self._arriving is not None:
            raise StoreBusy(f"version {self._arriving.version} is still arriving: seal or abort it first")
        if self._file(version).exists():
            raise VersionExists(
                f"{self.root} already holds version {version}; if an earlier run left it, remove that run's store"
            )
        partial = self.root / f"{version}{names.PARTIAL}"
        memory = self._take_spare(size)
        if memory is None:
            memory = self._memory(partial, size)
        else:
            memory.rename(partial)
        self._arriving = IncomingVersion(version, memory, self._arrived)
        return self._arriving

    def reserve(self, size: int) -> None:
        """Get memory ready for a version of `size` bytes, so that the next `begin` of that size costs nothing.

        Raises NoRoom, and StoreBusy while another process writes.
        """
        self._become_writer()
        if self._spare is not None and self._spare.size == size:
            return
        self._drop_spare()
        memory = self._memory(self.root / names.SPARE, size)
        memory.touch()
        self._spare = memory

    def evict(self, keep: int | None = None) -> list[PolicyVersion]:
        """Evict all but `keep` versions, but never the newest or a pinned one; return those evicted."""
        keep = max(self.keep if keep is None else keep, 1)
        versions = self.versions()
        if len(versions) <= keep:
            return []
        return [version for version in versions_to_evict(versions, self.live_versions(), keep) if self._remove(version)]

    def release_writer(self) -> None:
        """Be the store's writer no more, until the next `begin`: another process may write then.

        Reserved memory stays reserved for as long as no other process writes; see `tidy`.
        """
        if self._arriving is None and self._writer is not None:
            self._writer.release()
            self._writer = None

    def drop_lost_spare(self) -> None:
        """Let go of reserved memory that another writer has removed."""
        if self._spare is not None and not self._spare.is_there():
            self._drop_spare()

    def close(self) -> None:
        """Give up what is arriving and let go of the store; complete versions stay."""
        if self._arriving is not None:
            self._arriving.abort()
        self._drop_spare()
        if self._writer is not None:
            self._writer.release()
            self._writer = None
        self._share.release()

    def destroy(self) -> None:
        """Close, and remove the store with all its versions, whoever else has it open. See `remove_store`."""
        self.close()
        remove_store(self.root, in_use=True)

    def __enter__(self) -> WeightStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _file(self, version: PolicyVersion) -> Path:
        return self.root / names.weight_file(version)

    def _delta(self, version: PolicyVersion) -> Path:
        return self.root / f"{version}{names.DELTA}"

    def _become_writer(self) -> None:
        if self._writer is not None:
            return
        path = self.root / names.WRITER
        try:
            writer = locks.try_lock_exclusive(path, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError as error:
            raise StoreError(f"{self.root} was removed") from error
        if writer is None:
            pid = path.read_text(encoding="utf-8") or "unknown"
            raise StoreBusy(f"process {pid} writes to {self.root}: end it, or give this run another name")
        os.ftruncate(writer.fd, 0)
        os.pwrite(writer.fd, str(os.getpid()).encode(), 0)
        self._writer = writer
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
        if spare is None or spare.size != size or not spare.is_there():
            self._drop_spare()
            return None
        self._spare = None
        return spare

    def _drop_spare(self) -> None:
        if self._spare is not None:
            self._spare.drop()
            self._spare = None

    def _arrived(self) -> None:
        self._arriving = None

    def _remove(self, version: PolicyVersion) -> bool:
        """Remove a version if nobody reads it."""
        path = self._file(version)
        try:
            lock = locks.try_lock_exclusive(path)
        except FileNotFoundError:  # another process was quicker
            return False
        if lock is None:
            return False
        # The seal last: whoever sees the weights finds it.
        path.unlink(missing_ok=True)
        self._delta(version).unlink(missing_ok=True)
        (self.root / f"{version}{names.SIDECAR}").unlink(missing_ok=True)
        lock.release()
        return True


def open_mapped(path: Path) -> memoryview:
    """The bytes of a file, mapped for reading; the memory lives as long as the view. Raises FileNotFoundError."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


@contextmanager
def mapped(path: Path) -> Iterator[memoryview]:
    """The bytes of a file, mapped for reading until the `with` block ends."""
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory,
        memoryview(memory) as view,
    ):
        yield view
