"""A thread that copies the newest weight version of a machine to another place."""

from __future__ import annotations

import logging
from abc import abstractmethod

from infra.closing import ClosedAtExit
from infra.store.errors import StoreError, VersionExists, VersionGone
from infra.store.weight_store import WeightStore
from infra.system import SYSTEM, System
from schemas.records import PolicyVersion

log = logging.getLogger(__name__)

PART = 64 << 20
"""Bytes that are copied at once; a close waits for one part."""


class NewestCopier(ClosedAtExit):
    """Copies versions of `store` to `place`, one at a time, and begins at most one in `every_s` seconds.

    Of versions that arrive faster only the newest is copied. A copy that fails is logged; the next version is copied.
    """

    def __init__(self, store: WeightStore, place: str, every_s: float = 0.0, system: System = SYSTEM) -> None:
        self._store, self._place = store, place
        self._every_s, self._clock = every_s, system.monotonic
        self._begin_at = self._clock()
        self._wanted: PolicyVersion | None = None
        self._begun: PolicyVersion | None = None
        self.closed = False
        self._changed = system.condition()
        self._thread = system.start_thread(f"copies to {place}", self._run)

    def keep(self, version: PolicyVersion) -> None:
        """Copy `version`, unless a newer one is wanted. Does not wait."""
        with self._changed:
            if self._wanted is None or version > self._wanted:
                self._wanted = version
                self._changed.notify_all()

    def close(self) -> None:
        """End the thread; a copy that is not complete is discarded."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        self._thread.join(timeout=15)

    @abstractmethod
    def copy(self, version: PolicyVersion) -> None:
        """Copy `version`, and end early once this is `closed`. Raises StoreError, OSError."""

    def _run(self) -> None:
        while (version := self._next()) is not None:
            try:
                self.copy(version)
            except (VersionExists, VersionGone) as error:
                log.debug("version %s is not copied to %s: %s", version, self._place, error)
            except (StoreError, OSError) as error:
                log.warning("version %s could not be copied to %s: %s", version, self._place, error)

    def _next(self) -> PolicyVersion | None:
        """Wait for the next version to copy, and return it; None once this is closed."""
        with self._changed:
            while not self.closed:
                pause_s = self._begin_at - self._clock()
                if self._wanted == self._begun:
                    self._changed.wait()
                elif pause_s > 0:
                    self._changed.wait(pause_s)
                else:
                    self._begun, self._begin_at = self._wanted, self._clock() + self._every_s
                    return self._wanted
            return None
