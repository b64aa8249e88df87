"""WrappedEngine: what engines that wrap another one have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from pathlib import Path

from operators.rollout.engine import Completion, Engine, EngineStatus, PartialResponse
from operators.rollout.request_checks import check_loadable
from schemas.records import PolicyVersion


class WrappedEngine(ABC):
    """The part of an engine over `engine` that passes calls on. The next step returns the completions in `_ended`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ended: list[Completion] = []

    @property
    def version(self) -> PolicyVersion | None:
        """The weight version loaded, None before the first."""
        return self._engine.version

    def load(self, weights: Path, version: PolicyVersion) -> None:
        """As the engine's; also raises RuntimeError while only this engine holds a trajectory, as between two turns."""
        check_loadable(self.status(), version)
        self._engine.load(weights, version)

    def take_started(self) -> Sequence[str]:
        """As the engine's: a trajectory of several turns is listed once per turn."""
        return self._engine.take_started()

    @abstractmethod
    def status(self) -> EngineStatus:
        """As the engine's, with the trajectories that only this engine holds."""

    def close(self) -> None:
        """Free the engine's resources."""
        self._engine.close()

    def _take_ended(self) -> list[Completion]:
        ended, self._ended = self._ended, []
        return ended

    def _release_ended(self, trajectory_ids: Collection[str]) -> dict[str, PartialResponse]:
        """Remove the completions of `trajectory_ids` from `_ended`, and return their responses."""
        wanted = set(trajectory_ids)
        released = {each.trajectory_id: each.generated for each in self._ended if each.trajectory_id in wanted}
        self._ended = [each for each in self._ended if each.trajectory_id not in wanted]
        return released
