"""Stops a run that cannot learn: too many trajectories have errors, too many rows are refused, or none are left."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from infra.workers.error_text import first_line, place_of
from pipelines.config import Config
from pipelines.inspect.run_folders import run_command
from pipelines.inspect.run_state.errors import (
    ErrorCounts,
    drawn_and_refused,
    error_counts,
    errors_text,
    questions_drawn,
    refused_text,
)
from pipelines.inspect.run_state.state import RunState
from pipelines.inspect.run_state.waiting import SILENT_MS, is_over
from schemas.identity import trajectory_id

MAX_POINTS = 4096
ERROR = "reward_error"
HELD_OUT = trajectory_id("evaluation", 0, 0)[0]
"""First letter of the trajectory ids of evaluation."""
REFUSED_OPTION = "--set prompts.max_refused_share"
COLUMNS = ("trajectory_id", ERROR, "scored_at")
"""The columns of the experiences topic that `first_error_lines` reads."""


class RunFailing(RuntimeError):
    """Too many of the newest trajectories have an error, or too many rows were refused, or none are left.

    `detail_lines` have the first error with its traceback, `resume` the options of `runs resume` after a correction.
    """

    def __init__(self, message: str, details: Iterable[str] = (), resume: str = "") -> None:
        super().__init__(message)
        self.detail_lines, self.resume = tuple(details), resume


class ErrorGuard:
    """Checks the error share of the newest `window` trajectories against `share`; a window of 0 disables it.

    Only training counts: answers to held-out questions teach nothing, and fail when their version is gone.
    Errors that were in the log at its start do not count: a resumed run may have been repaired.
    """

    def __init__(self, share: float, window: int) -> None:
        self._share, self._window = share, window
        self._points: deque[ErrorCounts] = deque([ErrorCounts()], MAX_POINTS)

    def failing(self, state: RunState, earlier: bool = False) -> ErrorCounts | None:
        """The counts of the window if its error share is reached, else None.

        `earlier`: `state` may be of metrics that were in the log when the guard started.
        """
        if not self._window:
            return None
        counts, points = error_counts(state.score), self._points
        if earlier or counts.trajectories < points[-1].trajectories:
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


def failing_message(recent: ErrorCounts, folder: Path) -> str:
    """The message of a run that is stopped: the error share, the settings, and the command that lists the errors."""
    options = "-w \"reward_error != ''\" --columns trajectory_id,reward_error"
    return (
        f"the run was stopped, because it cannot learn: errors in {errors_text(recent)} of the newest "
        "(run.stop_error_share, run.stop_error_window). Each error: "
        f"`{run_command(folder, 'topics find experiences', options)}`"
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


MIN_DRAWN = 256
"""Questions drawn before the share of refused rows counts."""

END_MS = 30_000
"""How long nothing is left to train before the run is stopped; agents may be between two requests for longer."""

SHARD_AGE_MS = 60_000
"""How much older than the newest metric of score another shard's last one may be."""

Experiences = Callable[[int], Iterable[Mapping[str, Any]]]
"""Reads the experiences of a run that were written at a Unix time in milliseconds, or later."""

VISIBLE_PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6)
"""Before further reads: Kafka ends a transaction in one topic after the other, so a metric may be visible first."""


def _visible_error_lines(experiences: Experiences, written: int, scored: int, counts: ErrorCounts) -> list[str]:
    """The lines of the first error in `experiences` from `written` on; waits a while for those that `counts` has."""
    for pause_s in VISIBLE_PAUSES_S if counts.reward_errors else ():
        if lines := first_error_lines(experiences(written), scored):
            return lines
        time.sleep(pause_s)
    return first_error_lines(experiences(written), scored)


class RunGuard:
    """Checks the states of the run of `config`, which was read from `file`, since `started_at` (Unix milliseconds).

    `clock` (seconds) is this machine's: the state's time is the latest of all machines.
    """

    def __init__(
        self, config: Config, file: Path, started_at: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._errors = ErrorGuard(config.run.stop_error_share, config.run.stop_error_window)
        self._limits = {task.task_name: task.max_refused_share for task in config.prompts.mixture}
        self._has_tasks = bool(config.prompts.tasks)
        self._started_at, self._folder, self._file = started_at, config.run_folder, file
        self._earlier_errors, self._correct_until = 0, started_at
        self._epochs = config.prompts.epochs
        self._end_ms = END_MS + (0 if config.agents is None else 1000 * config.agents.timeout_s)
        self._silent_ms = max(SILENT_MS, 2000 * config.placement.heartbeat_timeout_s)
        self._over_since: float | None = None

    def check(self, state: RunState, experiences: Experiences, earlier: bool = False) -> None:
        """Raise RunFailing if the run must stop; `experiences` reads its experiences, for the first error.

        `earlier` as in `ErrorGuard.failing`.
        """
        counts = error_counts(state.score)
        errors = counts.errors + int(state.score.get("heldout_errors", 0))  # the first one has the traceback
        if earlier or errors <= self._earlier_errors:
            correct = state.last_metric_at.get("score", 0) - SHARD_AGE_MS
            self._earlier_errors, self._correct_until = errors, max(self._started_at, correct)
        if (recent := self._errors.failing(state, earlier)) is not None:
            lines = _visible_error_lines(experiences, self._correct_until, self._started_at, recent)
            raise RunFailing(failing_message(recent, self._folder), lines, "--accept-changes")  # of user code
        for task, (drawn, share) in drawn_and_refused(state.prompts).items():
            limit = self._limits.get(task, 1.0)
            if drawn >= MIN_DRAWN and share > limit:
                accepted = f"{min(1.0, share + 0.005):.2f}"
                message = self._refused_message(task, share, limit, refused_text(state.prompts), accepted)
                raise RunFailing(message, resume="" if self._has_tasks else f"{REFUSED_OPTION}={accepted}")
        self.check_end(state, experiences, self._correct_until if errors > self._earlier_errors else 0)

    def check_end(self, state: RunState, experiences: Experiences, since: int = 0) -> None:
        """Raise RunFailing if nothing is left to train before the goal; the first error is searched from `since` on."""
        if state.step >= (state.goal or 0) or not is_over(state, self._silent_ms):
            self._over_since = None
            return
        now = self._clock()
        self._over_since = now if self._over_since is None else self._over_since
        if 1000 * (now - self._over_since) >= self._end_ms:
            counts = error_counts(state.score)
            lines = _visible_error_lines(experiences, since, since, counts) if counts.errors else []
            raise RunFailing(self._end_message(state, errors_text(counts)), lines, self._more_epochs(state))

    def _more_epochs(self, state: RunState) -> str:
        """The option of `runs resume` with which the questions suffice at the rate so far; empty if a file has it."""
        if self._has_tasks or self._epochs is None:
            return ""
        epochs = math.ceil(self._epochs * (state.goal or 0) / state.step) if state.step else 2 * self._epochs
        return f"--set prompts.epochs={epochs}"

    def _end_message(self, state: RunState, errors: str) -> str:
        how = "" if self._more_epochs(state) else f": raise epochs or size in {self._file}"
        return (
            f"the run was stopped after {state.step} of {state.goal} optimizer steps: all "
            f"{questions_drawn(state.prompts)} questions are drawn (prompts.epochs), and no trajectory is left to train"
            f"{f'; errors in {errors}' if errors else ''}{how}"
        )

    def _refused_message(self, task: str, share: float, limit: float, refused: str, accepted: str) -> str:
        how = f"`{run_command(self._folder, 'runs resume', f'{REFUSED_OPTION}={accepted}')}`"
        if self._has_tasks:
            how = f"max_refused_share = {accepted} of this task in {self._file}"
        return (
            f"the run was stopped: {100 * share:.1f} % of the rows of task {task!r} are refused, more than "
            f"prompts.max_refused_share = {limit:g}; refused so far: {refused}. "
            f"`{run_command(self._folder, 'topics dlq list')}` lists them. Correct them and start a new run, or accept "
            f"them: {how}"
        )
