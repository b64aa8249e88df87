"""The pause of a run: while it lasts, no trajectory begins. Begun ones continue, and resume if they are lost."""

from __future__ import annotations

from dataclasses import dataclass

from operators.io.elements import Output
from schemas.records import Metric, Pause
from schemas.topics import METRICS, PAUSE

EVERY_S = 1.0
"""Minimum time between two metrics of one pause."""
REPEAT_S = 30.0
"""A metric is repeated after this time while the run is paused: observers read only the end of the topic."""


@dataclass(frozen=True, slots=True)
class WorkCounts:
    """Trajectories that have begun and not finished (`running`), and samples of a begun prompt that wait."""

    running: int
    waiting: int


class RunPause:
    """Holds the last `Pause` in the log, and decides when to publish its metric. The topic is read again at each start,
    so a start is paused before its first decision."""

    def __init__(self) -> None:
        self._last: Pause | None = None
        self._published: tuple[Pause, WorkCounts] | None = None
        self._published_at = 0.0

    @property
    def active(self) -> bool:
        """Whether the run is paused."""
        return self._last is not None and self._last.paused

    def record(self, pause: Pause) -> None:
        """Record a request."""
        self._last = pause

    def metric(self, counts: WorkCounts, now: float, wall_ms: int) -> list[Output]:
        """The metric of the last request, if it is due: for a new request, and for new `counts` during a pause.

        Its step is the number of the request.
        """
        last = self._last
        if last is None or not self._is_due(last, counts, now):
            return []
        self._published, self._published_at = (last, counts), now
        values = {"paused": float(last.paused)}
        if last.paused:
            values |= {"since": float(last.requested_at), "running": counts.running, "waiting": counts.waiting}
        return [Output(METRICS, PAUSE, Metric(PAUSE, last.number, values, wall_ms))]

    def _is_due(self, last: Pause, counts: WorkCounts, now: float) -> bool:
        if self._published is None or self._published[0] != last:
            return True
        age = now - self._published_at
        return last.paused and (age >= REPEAT_S or (self._published[1] != counts and age >= EVERY_S))
