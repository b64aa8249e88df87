"""The metric of the work that waits in placement: no replica has room for it. The autoscaler reads it."""

from __future__ import annotations

from operators.io.elements import Output
from schemas.records import Metric
from schemas.topics import METRICS, PLACEMENT

EVERY_S = 5.0
"""Minimum time between two metrics."""
REPEAT_S = 15.0
"""A metric is repeated after this time while work waits: readers begin at the end of the topic."""


class QueueMetric:
    """Decides when the number of waiting trajectories is published; `now` is in monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._published, self._at = 0, now

    def metric(self, waiting: int, step: int, now: float, wall_ms: int) -> list[Output]:
        """The metric of `waiting` trajectories, if it is due: if the number has changed, and in intervals."""
        age = now - self._at
        if age < EVERY_S or (waiting == self._published and (not waiting or age < REPEAT_S)):
            return []
        self._published, self._at = waiting, now
        return [Output(METRICS, PLACEMENT, Metric(PLACEMENT, step, {"waiting": float(waiting)}, wall_ms))]
