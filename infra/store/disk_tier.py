"""Copies of weight versions on a machine's disk, from which it starts when its memory is empty: after a reboot, or as a
new pod on the same node.

They are a weight store of their own in a folder: a copy appears whole or not at all, and has the seal of the version.
"""

from __future__ import annotations

import logging
from pathlib import Path

from infra.closing import ClosedAtExit
from infra.store.errors import StoreError, VersionExists, VersionGone
from infra.store.weight_store import WeightStore
from infra.system import SYSTEM, System
from schemas.records import PolicyVersion

log = logging.getLogger(__name__)

PART = 64 << 20
"""Bytes that are copied at once; a close waits for one part."""


class DiskTier(ClosedAtExit):
    """Copies versions of `store` to `folder`, which keeps the newest `keep`. A thread copies one at a time.

    Of versions that arrive faster than they are copied only the newest is copied. Raises StoreError for another user's
    folder.
    """

    def __init__(self, store: WeightStore, folder: Path, keep: int, system: System = SYSTEM) -> None:
        self.copies = WeightStore(folder, keep)
        self._store = store
        self._wanted: PolicyVersion | None = None
        self._begun: PolicyVersion | None = None
        self._closed = False
        self._changed = system.condition()
        self._thread = system.start_thread("disk copies", self._run)

    def keep(self, version: PolicyVersion) -> None:
        """Copy `version`, unless a newer one is wanted. Does not wait."""
        with self._changed:
            if self._wanted is None or version > self._wanted:
                self._wanted = version
                self._changed.notify_all()

    def close(self) -> None:
        """End the thread; a copy that is not complete is discarded."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=15)
        self.copies.close()

    def _run(self) -> None:
        while (version := self._next()) is not None:
            try:
                self._copy(version)
            except (VersionExists, VersionGone) as error:
                log.debug("version %s is not copied to the disk: %s", version, error)
            except (StoreError, OSError) as error:
                log.warning("version %s could not be copied to the disk: %s", version, error)
            finally:
                self.copies.release_writer()

    def _next(self) -> PolicyVersion | None:
        """Wait for the next version to copy, and return it; None once this is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._wanted != self._begun)
            self._begun = self._wanted
            return None if self._closed else self._wanted

    def _copy(self, version: PolicyVersion) -> None:
        seal = self._store.seal(version)
        with self._store.read(version, seal.blake3) as data, self.copies.begin(version, len(data)) as copy:
            for begin in range(0, len(data), PART):
                if self._closed:
                    return
                end = min(begin + PART, len(data))
                copy.view[begin:end] = data[begin:end]
                copy.hash_to(end)
            copy.seal(seal.blake3)
        self.copies.evict()
