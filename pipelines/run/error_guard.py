"""Stops a run whose rewards or episodes all fail: it would train on nothing and still reach its goal."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from infra.workers.error_text import first_line, place_of
from pipelines.inspect.run_state.errors import ErrorCounts, error_counts, errors_text
from pipelines.inspect.run_state.state import RunState
from schemas.identity import trajectory_id

MAX_POINTS = 4096
ERROR = "reward_error"
HELD_OUT = trajectory_id("evaluation", 0, 0)[0]
"""First letter of the trajectory ids of evaluation."""
COLUMNS = ("trajectory_id", ERROR, "scored_at")
"""The columns of the experiences topic that `first_error_lines` reads."""


class RunFailing(RuntimeError):
    """Too many of the newest trajectories have an error. `detail_lines` have the first error with its traceback."""

    def __init__(self, message: str, details: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.detail_lines = tuple(details)


class ErrorGuard:
    """Checks the error share of the newest `window` trajectories against `share`; a window of 0 disables it.

    Only training counts: answers to held-out questions teach nothing, and fail when their version is gone.
    Errors before `started_at` (Unix milliseconds) do not count: a resumed run may have been repaired.
    """

    def __init__(self, share: float, window: int, started_at: int) -> None:
        self._share, self._window, self._started_at = share, window, started_at
        self._points: deque[ErrorCounts] = deque([ErrorCounts()], MAX_POINTS)

    def failing(self, state: RunState) -> ErrorCounts | None:
        """The counts of the window if its error share is reached, else None."""
        if not self._window:
            return None
        counts, points = error_counts(state.score), self._points
        if state.last_metric_at.get("score", 0) < self._started_at or counts.trajectories < points[-1].trajectories:
            points.clear()
            points.append(counts)
            return None
        if counts.trajectories > points[-1].trajectories:
            points.append(counts)
        while len(points) > 2 and counts.trajectories - points[1].trajectories >= self._window:
            points.popleft()
        recent = counts.since(points[0])
        full = recent.trajectories >= self._window
        return recent if full and recent.errors >= self._share * recent.trajectories else None


def failing_message(recent: ErrorCounts, run: str) -> str:
    """The message of a run that is stopped: the error share, the settings, and the command that lists the errors."""
    return (
        f"the run was stopped, because it cannot learn: errors in {errors_text(recent)} of the newest "
        f"(run.stop_error_share, run.stop_error_window). Each error: `laminar topics find experiences --run {run} "
        "-w \"reward_error != ''\" --columns trajectory_id,reward_error`"
    )


def first_error_lines(rows: Iterable[Mapping[str, Any]], since: int) -> list[str]:
    """The first error of training in `rows` scored at `since` or later, with the traceback of its place, as lines.

    Only the first error of a place in user code has a traceback, and that may be one of a held-out answer.
    """
    found: Mapping[str, Any] | None = None
    traces: dict[str, list[str]] = {}
    for row in rows:
        if row[ERROR] is None or row["scored_at"].timestamp() * 1000 < since:
            continue
        line, *trace = row[ERROR].split("\n")
        if trace:
            traces.setdefault(place_of(line), trace)
        if found is None and not row["trajectory_id"].startswith(HELD_OUT):
            found = row
        if found is not None and place_of(first_line(found[ERROR])) in traces:
            break
    if found is None:
        return []
    line = first_line(found[ERROR])
    return [f"The first error, of trajectory {found['trajectory_id']}: {line}", *traces.get(place_of(line), ())]
