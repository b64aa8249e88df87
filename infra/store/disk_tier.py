"""Copies of weight versions on a machine's disk, from which it starts when its memory is empty: after a reboot, or as a
new pod on the same node.

They are a weight store of their own in a folder: a copy appears whole or not at all, and has the seal of the version.
"""

from __future__ import annotations

from pathlib import Path

from infra.store import newest_copier
from infra.store.newest_copier import NewestCopier
from infra.store.weight_store import WeightStore
from infra.system import SYSTEM, System
from schemas.records import PolicyVersion


class DiskTier(NewestCopier):
    """Copies versions of `store` to `folder`, which keeps the newest `keep`. Raises StoreError for another user's
    folder."""

    def __init__(self, store: WeightStore, folder: Path, keep: int, system: System = SYSTEM) -> None:
        self.copies = WeightStore(folder, keep)
        super().__init__(store, "the disk", system=system)

    def close(self) -> None:
        """As NewestCopier; closes the copies."""
        super().close()
        self.copies.close()

    def copy(self, version: PolicyVersion) -> None:
        """As NewestCopier: a weight version of the folder."""
        seal = self._store.seal(version)
        try:
            with self._store.read(version, seal.blake3) as data, self.copies.begin(version, len(data)) as copy:
                for begin in range(0, len(data), newest_copier.PART):
                    if self.closed:
                        return
                    end = min(begin + newest_copier.PART, len(data))
                    copy.view[begin:end] = data[begin:end]
                    copy.hash_to(end)
                copy.seal(seal.blake3)
        finally:
            self.copies.release_writer()
        self.copies.evict()
