"""Copies of weight versions in an object store, or a folder that all machines mount: what machines start from that
reach no other one with the weights.

Readers compare every byte with the manifest, so the store need not be trusted.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from infra.storage import RangeReader, RemotePath, StorageFolder
from infra.store import newest_copier
from infra.store.names import weight_file
from infra.store.newest_copier import NewestCopier
from infra.store.sealed_objects import has_version, remove_versions_before, write_seal
from infra.store.weight_store import WeightStore
from infra.system import SYSTEM, System
from schemas.records import PolicyVersion


class ObjectTier(NewestCopier):
    """Copies versions of `store` to `folder`, which keeps the newest `keep`; see NewestCopier for `every_s`."""

    def __init__(
        self, store: WeightStore, folder: StorageFolder, keep: int, every_s: float, system: System = SYSTEM
    ) -> None:
        self.folder, self._keep = folder, keep
        super().__init__(store, str(folder), every_s, system)

    def has(self, version: PolicyVersion, blake3: str) -> bool:
        """Whether the store has these bytes of `version`. Raises OSError."""
        return has_version(self.folder, version, blake3)

    def reading(self, version: PolicyVersion) -> AbstractContextManager[RangeReader]:
        """Read the bytes of `version` during the `with` block. Raises OSError."""
        return RangeReader(self.folder / weight_file(version))

    def copy(self, version: PolicyVersion) -> None:
        """As NewestCopier: two files, the seal last; then older versions are removed."""
        seal = self._store.seal(version)
        if not self.has(version, seal.blake3):
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._store.read(version, seal.blake3) as data:
                if not self._write(self.folder / weight_file(version), data):
                    return
            write_seal(self.folder, version, seal.bytes, seal.blake3)
        remove_versions_before(self.folder, version, self._keep)

    def _write(self, file: StorageFolder, data: memoryview) -> bool:
        """Write `data` to `file`; False if this was closed before the end."""
        with file.open_output() if isinstance(file, RemotePath) else file.open("wb") as sink:
            for begin in range(0, len(data), newest_copier.PART):
                if self.closed:
                    return False
                sink.write(data[begin : begin + newest_copier.PART])
        return True
