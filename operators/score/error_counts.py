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
COUNTS = ("trajectories", "reward_errors", "episode_errors", "generation_errors")
"""All scored trajectories; those whose reward function failed, whose environment failed, whose generation failed."""


class ErrorCounts:
    """The counts of a run since its start; `state` of the commit note continues them after a restart of `group`."""

    def __init__(self, group: str, state: Mapping[str, int] | None = None) -> None:
        self._counters = StepCounters(group, {name: (state or {}).get(name, 0) for name in COUNTS})
        self._published = self._counters.totals["trajectories"]
        self._published_at = 0

    def add(self, experiences: Block) -> None:
        """Count `experiences`."""
        failed = pc.equal(experiences.column("trajectory.finish_reason"), "failed")
        in_episode = pc.not_equal(experiences.column("trajectory.prompt.environment"), "")
        errors = pc.is_valid(experiences.column("error"))
        self._counters.add("trajectories", len(experiences))
        self._counters.add("reward_errors", _true(pc.and_not(errors, failed)))
        self._counters.add("episode_errors", _true(pc.and_(failed, in_episode)))
        self._counters.add("generation_errors", _true(pc.and_not(failed, in_episode)))

    def metric(self, now: int) -> Metric | None:
        """The metric `score` at `now` (Unix milliseconds) if the counts are new and the last one is old enough."""
        scored = self._counters.totals["trajectories"]
        if scored == self._published or 0 <= now - self._published_at < EVERY_MS:  # negative: the clock was set back
            return None
        self._published, self._published_at = scored, now
        return Metric("score", scored, {name: float(count) for name, count in self.state().items()}, now)

    def state(self) -> dict[str, int]:
        """The counts, JSON-ready."""
        return dict(self._counters.totals)


def _true(values: pa.Array) -> int:
    return int(pc.sum(values).as_py() or 0)
