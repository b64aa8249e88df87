"""When a replica reports what its running trajectories have gained."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from operators.rollout.running_request import RunningRequest

STREAM_S = 0.2
"""A trajectory whose agent reads along is due after so many seconds."""


class ProgressSchedule:
    """A trajectory is due after `tokens` engine steps, or `seconds` seconds, since its last report.

    All trajectories are checked at an eighth of these intervals, so a step costs nothing between two checks.
    """

    def __init__(self, tokens: int, seconds: float) -> None:
        self._tokens, self._seconds = tokens, seconds
        self._next_step, self._next_check = 0, 0.0
        self.steps = 0
        """Engine steps so far; the caller counts them."""

    def due(self, running: Mapping[str, RunningRequest], clock: float, streaming: Collection[str] = ()) -> list[str]:
        """The `running` trajectories that are due at `clock` (monotonic seconds); agents read those in `streaming`."""
        due = self._due(running, clock)
        return due + [n for n in streaming if clock - running[n].reported_at >= STREAM_S and n not in due]

    def _due(self, running: Mapping[str, RunningRequest], clock: float) -> list[str]:
        if self.steps < self._next_step and clock < self._next_check:
            return []
        self._next_step = self.steps + max(1, self._tokens // 8)
        self._next_check = clock + self._seconds / 8
        return [
            name
            for name, each in running.items()
            if self.steps - each.reported_step >= self._tokens or clock - each.reported_at >= self._seconds
        ]
