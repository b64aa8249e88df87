"""ScoreTrajectories: every finished trajectory gets exactly one answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from operators.io.elements import Checkpoint, Output, Place, Polled, Restored
from operators.io.ledger import TrajectoryLedger
from operators.score.config import ScoreConfig
from operators.score.scorer import Scorer
from operators.score.scoring import score_trajectories
from schemas.identity import parse_trajectory_id
from schemas.topics import EXPERIENCES


@dataclass(frozen=True)
class ScoreTrajectories:
    """Scores the first Trajectory of each id and passes over later ones. `partitions` of the topics keyed by group."""

    config: ScoreConfig
    partitions: int

    def restore(self, restored: Restored) -> _Scoring:
        ledger = TrajectoryLedger(self.partitions, restored.marks.get("scored"))
        for received in restored.ledger:
            trajectory = received.record.trajectory
            ledger.add(parse_trajectory_id(trajectory.trajectory_id), trajectory.prompt.samples, 0)
        return _Scoring(Scorer(self.config), ledger)


class _Scoring:
    def __init__(
        self, scorer: Scorer, scored: TrajectoryLedger, now: Callable[[], int] = lambda: time.time_ns() // 10**6
    ) -> None:
        self._scorer, self._scored, self._now = scorer, scored, now
        self._emissions = 0

    def fold(self, polled: Polled) -> list[Output]:
        self._emissions += 1
        fresh = [
            received
            for received in polled.records
            if self._scored.add(
                parse_trajectory_id(received.record.trajectory_id), received.record.prompt.samples, self._emissions
            )
        ]
        if not fresh:
            return []
        experiences = score_trajectories([received.record for received in fresh], self._scorer, self._now())
        return [
            Output(EXPERIENCES, experience.trajectory.prompt.prompt_id, experience, received.partition)
            for received, experience in zip(fresh, experiences, strict=True)
        ]

    def checkpoint(self, positions: Mapping[Place, int]) -> Checkpoint:
        return Checkpoint(positions, self._scored.oldest_emission(), {"scored": self._scored.marks()})

    def busy(self) -> bool:
        return False

    def close(self) -> None:
        self._scorer.close()
