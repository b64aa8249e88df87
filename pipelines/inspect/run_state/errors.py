"""Training trajectories that have an error and rows that are refused, by kind: metrics `score` and `prompts`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from infra.counted import counted
from schemas.metric_labels import FIRST_ERROR, REFUSED, TASK, TEXT, split_labels, values_by_task

_TEXTS = {"reward_errors": "rewards", "episode_errors": "episodes", "generation_errors": "generation"}


class ErrorCounts(NamedTuple):
    """Scored trajectories of training, and those whose reward function, environment or generation failed."""

    trajectories: int = 0
    reward_errors: int = 0
    episode_errors: int = 0
    generation_errors: int = 0

    @property
    def errors(self) -> int:
        """Trajectories with an error."""
        return sum(self[1:])

    @property
    def share(self) -> float | None:
        """The share of trajectories with an error; None before the first is scored."""
        return self.errors / self.trajectories if self.trajectories else None

    def since(self, earlier: ErrorCounts) -> ErrorCounts:
        """The counts after `earlier`."""
        return ErrorCounts(*(now - then for now, then in zip(self, earlier, strict=True)))


def error_counts(score: Mapping[str, float]) -> ErrorCounts:
    """The counts in the values of the metric `score`; 0 for missing ones."""
    return ErrorCounts(*(int(score.get(name, 0)) for name in ErrorCounts._fields))


def errors_text(counts: ErrorCounts) -> str:
    """Return `12 % of 64 trajectories (rewards 6, episodes 2)`; empty without errors."""
    if not counts.errors or counts.share is None:
        return ""
    kinds = ", ".join(f"{text} {getattr(counts, name)}" for name, text in _TEXTS.items() if getattr(counts, name))
    share = 100 * counts.share
    shown = f"{share:.0f}" if 1 <= share <= 99 or counts.errors == counts.trajectories else f"{share:.1f}"
    return f"{shown} % of {counts.trajectories} trajectories ({kinds})"


class TaskErrors(NamedTuple):
    """The scored trajectories of training of one task, those with an error, and the first error, in one line."""

    trajectories: int = 0
    errors: int = 0
    first_error: str | None = None


def errors_by_task(score: Mapping[str, float]) -> dict[str, TaskErrors]:
    """The counts of each task in the values of the metric `score`, tasks with most errors first."""
    errors = values_by_task(score, "errors")
    labels = [found for name, found in map(split_labels, score) if name == FIRST_ERROR]
    first = {each[TASK]: each[TEXT] for each in labels if TASK in each and TEXT in each}
    tasks = {
        task: TaskErrors(int(count), int(errors.get(task, 0)), first.get(task))
        for task, count in values_by_task(score, "trajectories").items()
    }
    return dict(sorted(tasks.items(), key=lambda item: -item[1].errors))


def which_errors(tasks: Mapping[str, TaskErrors]) -> str:
    """Return `task hard 88 of 90: KeyError: 'x' (env.py:3)`: the tasks with errors, and the first error of each.

    A single task is not named. Empty without errors.
    """
    return "; ".join(
        (f"task {task} {each.errors} of {each.trajectories}" if len(tasks) > 1 else "first")
        + (f": {each.first_error}" if each.first_error else "")
        for task, each in tasks.items()
        if each.errors and (each.first_error or len(tasks) > 1)
    )


def score_errors_text(score: Mapping[str, float]) -> str:
    """Return `errors_text` and `which_errors` of the values of the metric `score`; empty without errors."""
    parts = (errors_text(error_counts(score)), which_errors(errors_by_task(score)))
    return ", ".join(part for part in parts if part)


def refused_rows(prompts: Mapping[str, float]) -> dict[str, int]:
    """Refused rows by kind, in the values of the metric `prompts`."""
    return {key.removeprefix(REFUSED): int(count) for key, count in prompts.items() if key.startswith(REFUSED)}


def drawn_and_refused(prompts: Mapping[str, float]) -> dict[str, tuple[int, float]]:
    """By task: the questions drawn, and the estimated share of refused rows, in the values of the metric `prompts`."""
    drawn, shares = values_by_task(prompts, "drawn"), values_by_task(prompts, "refused_share")
    return {task: (int(count), shares.get(task, 0.0)) for task, count in drawn.items()}


def questions_drawn(prompts: Mapping[str, float]) -> int:
    """The questions drawn of all tasks, in the values of the metric `prompts`."""
    return int(sum(values_by_task(prompts, "drawn").values()))


def refused_text(prompts: Mapping[str, float]) -> str:
    """Return `12 rows (too long 10, no answer 2)`; empty without refused rows."""
    kinds = refused_rows(prompts)
    if not kinds:
        return ""
    total = sum(kinds.values())
    return f"{counted(total, 'row')} ({', '.join(f'{kind} {count}' for kind, count in kinds.items())})"
