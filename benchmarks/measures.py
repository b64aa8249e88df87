"""The speed of a training run, computed from its steps."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

SETTLED_AFTER = 5
"""Earlier steps are start-up: first weights, first compilations, pipelines that fill."""


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step: when it ended in seconds since the first dispatch, the mean reward of the batch that it
    trained, and how many trajectories were trained by then."""

    number: int
    ended: float
    reward: float
    trajectories: float


def seconds_a_batch(steps: Sequence[Step], batch: int) -> tuple[float, float] | None:
    """Seconds per `batch` trained trajectories after start-up: median over steps, and mean. None without such steps."""
    measured = [step for step in steps if step.number >= SETTLED_AFTER]
    pairs = list(pairwise(measured))
    if not pairs:
        return None
    each = [(b.ended - a.ended) / (b.trajectories - a.trajectories) * batch for a, b in pairs]
    whole = (measured[-1].ended - measured[0].ended) / (measured[-1].trajectories - measured[0].trajectories) * batch
    return statistics.median(each), whole


def seconds_to(steps: Sequence[Step], reward: float, window: int) -> float | None:
    """When the mean reward of the last `window` batches first reached `reward`; None if it never did."""
    for last in range(window, len(steps) + 1):
        if statistics.fmean(step.reward for step in steps[last - window : last]) >= reward:
            return steps[last - 1].ended
    return None


def skipped_share(batches: Iterable[Mapping[str, float]]) -> float | None:
    """The share of trajectories that the trainer skipped because their advantage is 0, from the metrics of `batches`;
    None without trajectories."""
    counts = [(values["batch/skipped_rows"], values["batch/trajectories"]) for values in batches]
    skipped, trained = map(sum, zip(*counts, strict=True)) if counts else (0, 0)
    return skipped / trained if trained else None


def median(values: Iterable[float | None]) -> float | None:
    """The median, with None as the largest value; None if the median is None or there are no values."""
    ordered = sorted(values, key=lambda value: (value is None, value or 0.0))
    if not ordered:
        return None
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return None if low is None or high is None else (low + high) / 2


def spread(values: Iterable[float | None]) -> tuple[float, float, float, int] | None:
    """Least, median and greatest of the values that are not None, and their number; None if there are none."""
    known = [value for value in values if value is not None]
    return (min(known), statistics.median(known), max(known), len(known)) if known else None


@dataclass(frozen=True, slots=True)
class EngineUse:
    """What rollout engines have done in some time: tokens, steps, and CPU seconds in model code."""

    tokens: float
    steps: float
    model_seconds: float

    def figures(self) -> dict[str, float]:
        """Tokens a CPU second, and rows in a step; a draft's tokens count for the row too. Empty without steps."""
        if not self.steps or not self.model_seconds:
            return {}
        return {"tokens_a_cpu_second": self.tokens / self.model_seconds, "rows_a_step": self.tokens / self.steps}


def idle_share(cpu_seconds: float, seconds: float, cores: int, others: float) -> float:
    """The share of `cores` that neither a side's `cpu_seconds` nor `others` (a share) used in `seconds`."""
    return max(0.0, 1 - others - cpu_seconds / (cores * seconds))


def outside(model_seconds: float, process_seconds: float) -> float | None:
    """The share of a process's CPU time that is not model code."""
    return max(0.0, 1 - model_seconds / process_seconds) if process_seconds else None
