"""Chooses the weight version of one engine and loads it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from infra.store.errors import VersionGone
from operators.rollout.engine import CannotGenerate, Engine
from schemas.records import PolicyVersion, ReplicaState

log = logging.getLogger(__name__)


class Weights(Protocol):
    """The weight versions on a replica's machine."""

    def versions(self) -> Collection[PolicyVersion]:
        """The complete versions."""

    def pin(self, version: PolicyVersion) -> AbstractContextManager[Path]:
        """The file of `version`, which is not evicted while the context lasts. Raises VersionGone."""


class WeightLoader:
    """Loads weights into `engine` of replica `index`.

    `newest` is the newest version announced. A version may be announced before its bytes are complete on this machine,
    and may be evicted later. Only versions that `may_load` accepts are loaded.
    """

    def __init__(
        self,
        index: int,
        engine: Engine,
        weights: Weights,
        may_load: Callable[[PolicyVersion], bool] = lambda version: True,
    ) -> None:
        self._index, self._engine, self._weights, self._may_load = index, engine, weights, may_load
        self._loading = False
        self.newest: PolicyVersion | None = None

    @property
    def state(self) -> ReplicaState:
        """`loading` during a load, and `running` once the engine has a version."""
        if self._loading:
            return "loading"
        return "running" if self._engine.version is not None else "starting"

    def announce(self, version: PolicyVersion) -> None:
        """Record that `version` was published."""
        self.newest = max(filter(None, (self.newest, version)))

    def available(self) -> Collection[PolicyVersion]:
        """The complete versions on this machine."""
        return self._weights.versions()

    def would_load(self, named: PolicyVersion | None) -> PolicyVersion | None:
        """The version to load now: `named`, or the newest available one if `named` is None or not available.

        None if the engine has it, or may not load it.
        """
        available = self.available()
        version = named if named in available else self._newest_of(available)
        if version is None or version == self._engine.version or not self._may_load(version):
            return None
        return version

    def load(self, version: PolicyVersion) -> bool:
        """Load `version`; returns False, and logs a warning, if it was evicted in the meantime.

        Raises CannotGenerate if the engine's model cannot have these weights.
        """
        self._loading, loaded = True, False
        try:
            with self._weights.pin(version) as file:
                self._engine.load(file, version)
            loaded = True
        except VersionGone as gone:
            log.warning("replica %d: weight version %s is gone: %s", self._index, version, gone)
        except ValueError as error:
            raise CannotGenerate(
                f"replica {self._index} cannot load weight version {version}: {error}. Set model.path to the trainer's "
                "model here, too"
            ) from error
        finally:
            self._loading = False
        return loaded

    def _newest_of(self, available: Collection[PolicyVersion]) -> PolicyVersion | None:
        return max((v for v in available if self.newest is not None and v <= self.newest), default=None)
