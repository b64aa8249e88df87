"""Held-out accuracy of weight versions, from the metrics `evaluation`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipelines.inspect.run_state.buffers import Values
from schemas.metric_labels import values_by_task
from schemas.records import Metric

MODES = "greedy", "sampled"
"""How held-out questions are answered."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out accuracy of one weight version; None if not measured. With several tasks `by_task` has the greedy and
    `sampled_by_task` the sampled one of each.

    Accuracy is the share of correct answers, those with a full reward; `*_reward` are mean rewards. `unmeasured`: by
    mode, the valid answers, the questions and the failed answers of a round with too few valid ones. `given_up`: the
    modes of these that will not be repeated.
    """

    version: int
    greedy: float | None
    sampled: float | None
    questions: int | None
    final: bool
    by_task: Values = field(default_factory=dict)
    sampled_by_task: Values = field(default_factory=dict)
    greedy_reward: float | None = None
    sampled_reward: float | None = None
    unmeasured: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    given_up: frozenset[str] = frozenset()


def merge_evaluation(known: Evaluation | None, metric: Metric) -> Evaluation:
    """`known` updated by `metric` of the same version; greedy and sampled answers come in separate records."""
    known = known or Evaluation(metric.step, None, None, None, False)
    values = metric.values
    return Evaluation(
        metric.step,
        values.get("accuracy/greedy", known.greedy),
        values.get("accuracy/sampled", known.sampled),
        int(values["questions"]) if "questions" in values else known.questions,
        bool(values.get("final")) or known.final,
        {**known.by_task, **values_by_task(values, "accuracy/greedy")},
        {**known.sampled_by_task, **values_by_task(values, "accuracy/sampled")},
        values.get("reward/greedy", known.greedy_reward),
        values.get("reward/sampled", known.sampled_reward),
        _unmeasured(known.unmeasured, values),
        _given_up(known.given_up, values),
    )


def _given_up(known: frozenset[str], values: Values) -> frozenset[str]:
    new = [mode for mode in MODES if values.get("given_up") and f"unanswered/{mode}" in values]
    return frozenset(mode for mode in {*known, *new} if f"accuracy/{mode}" not in values)


def _unmeasured(known: Mapping[str, tuple[int, int, int]], values: Values) -> Mapping[str, tuple[int, int, int]]:
    found = {mode: counts for mode, counts in known.items() if f"accuracy/{mode}" not in values}
    for mode in MODES:
        if f"accuracy/{mode}" not in values and f"unanswered/{mode}" in values:
            answers = int(values.get("questions", 0))
            questions = answers + int(values[f"unanswered/{mode}"])
            found[mode] = answers, questions, int(values.get(f"failed/{mode}", 0))
    return found


def unmeasured_rounds(evaluation: Evaluation) -> list[str]:
    """The rounds of `evaluation` with too few answers for an accuracy, as `version 0 sampled (2 of 400 answers)`; where
    answers failed, with their share, as `version 0 greedy (48 of 64 answers, 25 % failed)`."""
    return [
        f"version {evaluation.version} {mode} ({answers} of {questions} answers"
        + (f", {100 * failed / questions:.0f} % failed)" if failed else ")")
        for mode, (answers, questions, failed) in sorted(evaluation.unmeasured.items())
    ]
