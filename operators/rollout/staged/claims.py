"""Which weight version the parameters of an engine may hold: those of a stage must not change while it is used."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from schemas.records import PolicyVersion


class WeightClaims:
    """The versions that the stages of one engine use. A thread that changes weights does so within `changing`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stages: dict[str, PolicyVersion] = {}

    @property
    def version(self) -> PolicyVersion | None:
        """The version that stages use; None if there are none."""
        return next(iter(self._stages.values()), None)

    def version_besides(self, group: str) -> PolicyVersion | None:
        """The version that stages of other groups than `group` use; None if there are none."""
        return next((version for name, version in self._stages.items() if name != group), None)

    @contextmanager
    def changing(self, version: PolicyVersion) -> Iterator[bool]:
        """Whether the weights may be changed to `version` during the `with` block; no stage starts meanwhile."""
        with self._lock:
            yield self.version in (None, version)

    @contextmanager
    def claiming(self, group: str, version: PolicyVersion) -> Iterator[bool]:
        """As `changing`; if so and the block succeeds, a stage of `group` uses `version` until `release`."""
        with self._lock:
            free = self.version in (None, version)
            yield free
            if free:
                self._stages[group] = version

    def release(self, group: str) -> None:
        """The stage of `group` has ended. Does nothing if there is none."""
        self._stages.pop(group, None)
