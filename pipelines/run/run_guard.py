"""Stops a run that cannot learn: too many of its trajectories have errors, or too many of its rows are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pipelines.config import Config
from pipelines.inspect.run_state.errors import drawn_and_refused, refused_text
from pipelines.inspect.run_state.state import RunState
from pipelines.run.error_guard import ErrorGuard, RunFailing, failing_message, first_error_lines

MIN_DRAWN = 256
"""Questions drawn before the share of refused rows counts."""

Experiences = Iterable[Mapping[str, Any]]


class RunGuard:
    """Checks the states of the run of `config` since `started_at` (Unix milliseconds); `run` names it in commands."""

    def __init__(self, config: Config, started_at: int, run: str) -> None:
        self._errors = ErrorGuard(config.run.stop_error_share, config.run.stop_error_window, started_at)
        self._limits = {task.task_name: task.max_refused_share for task in config.prompts.mixture}
        self._has_tasks = bool(config.prompts.tasks)
        self._started_at, self._run = started_at, run

    def check(self, state: RunState, experiences: Callable[[], Experiences]) -> None:
        """Raise RunFailing if the run must stop; `experiences` reads its experiences, for the first error."""
        if (recent := self._errors.failing(state)) is not None:
            lines = first_error_lines(experiences(), self._started_at)
            raise RunFailing(failing_message(recent, self._run), lines)
        for task, (drawn, share) in drawn_and_refused(state.prompts).items():
            limit = self._limits.get(task, 1.0)
            if drawn >= MIN_DRAWN and share > limit:
                raise RunFailing(self._refused_message(task, share, limit, refused_text(state.prompts)))

    def _refused_message(self, task: str, share: float, limit: float, refused: str) -> str:
        accepted = min(1.0, share + 0.005)
        how = f"laminar runs resume --run {self._run} --set prompts.max_refused_share={accepted:.2f}"
        if self._has_tasks:
            how = f"max_refused_share = {accepted:.2f} of this task in the run's config.toml, then laminar runs resume"
        return (
            f"the run was stopped: {100 * share:.1f} % of the rows of task {task!r} are refused, more than "
            f"prompts.max_refused_share = {limit:g}; refused so far: {refused}. `laminar topics dlq list --run "
            f"{self._run}` lists them. Correct them and start a new run, or accept them: `{how}`"
        )
