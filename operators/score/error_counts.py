"""Counts scored trajectories and their errors, for the metric `score`."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from infra.runners.step_metrics import StepCounters
from schemas.block import Block
from schemas.records import Metric

EVERY_MS = 1_000
"""The shortest time between two metrics."""
COUNTS = (
    "trajectories",
    "reward_errors",
    "episode_errors",
    "generation_errors",
    "heldout_trajectories",
    "heldout_errors",
)
"""Scored trajectories of training; those whose reward function failed, whose environment failed, whose generation
failed. Then those of evaluation, and those of them with any error: nothing is trained on them."""


class ErrorCounts:
    """The counts of a run since its start; `state` of the commit note continues them after a restart of `group`."""

    def __init__(self, group: str, state: Mapping[str, int] | None = None) -> None:
        self._counters = StepCounters(group, {name: (state or {}).get(name, 0) for name in COUNTS})
        self._published = self._scored()
        self._published_at = 0

    def add(self, experiences: Block) -> None:
        """Count `experiences`."""
        held_out = pc.equal(experiences.column("trajectory.prompt.purpose"), "evaluation")
        failed = pc.equal(experiences.column("trajectory.finish_reason"), "failed")
        in_episode = pc.not_equal(experiences.column("trajectory.prompt.environment"), "")
        errors = pc.is_valid(experiences.column("error"))
        for name, kind in (
            ("reward_errors", pc.and_not(errors, failed)),
            ("episode_errors", pc.and_(failed, in_episode)),
            ("generation_errors", pc.and_not(failed, in_episode)),
        ):
            self._counters.add(name, _true(pc.and_not(kind, held_out)))
        self._counters.add("trajectories", len(experiences) - _true(held_out))
        self._counters.add("heldout_trajectories", _true(held_out))
        self._counters.add("heldout_errors", _true(pc.and_(pc.or_(errors, failed), held_out)))

    def metric(self, now: int) -> Metric | None:
        """The metric `score` at `now` (Unix milliseconds) if the counts are new and the last one is old enough."""
        scored = self._scored()
        if scored == self._published or 0 <= now - self._published_at < EVERY_MS:  # negative: the clock was set back
            return None
        self._published, self._published_at = scored, now
        return Metric("score", scored, {name: float(count) for name, count in self.state().items()}, now)

    def state(self) -> dict[str, int]:
        """The counts, JSON-ready."""
        return dict(self._counters.totals)

    def _scored(self) -> int:
        return self._counters.totals["trajectories"] + self._counters.totals["heldout_trajectories"]


def _true(values: pa.Array) -> int:
    return int(pc.sum(values).as_py() or 0)
