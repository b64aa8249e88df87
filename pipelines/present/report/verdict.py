"""The verdicts of a report: sentences computed from a run's summary, with no claim beyond its numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.inspect.run_folders import run_command
from pipelines.inspect.run_state.errors import ErrorCounts, TaskErrors, errors_text, which_errors
from pipelines.inspect.run_state.learning import NO_REWARD
from pipelines.present.view.text import figure

RunSummary = Mapping[str, Any]
FEW = 100
"""Trajectories of which a mean reward says little: a dozen groups."""


def standard_error(accuracy: float, questions: int) -> float:
    """Return the standard error of an accuracy measured on `questions` independent questions."""
    return math.sqrt(max(accuracy * (1 - accuracy), 0.0) / questions)


def training_verdict(summary: RunSummary) -> str:
    """Return the change of the reward and of the held-out accuracy."""
    sentences = []
    first, last, constant = (summary.get(f"reward_{name}") for name in ("first", "last", "constant"))
    if constant is not None:
        advice = "" if constant else f": {NO_REWARD}"
        sentences.append(f"All rewards were equal ({figure(constant)}), so nothing could be learned{advice}.")
    elif first is not None and last is not None:
        sentences.append(
            f"Mean reward changed from {figure(first)} to {figure(last)} (first and last tenth of the trajectories)."
        )
        tenth = (summary.get("trajectories_trained") or 0) // 10
        if 0 < tenth < FEW:
            sentences.append(f"A tenth is {tenth} trajectories here, so this change may be noise.")
    before, after = summary.get("heldout_before"), summary.get("heldout_after")
    if before is not None and after is not None:
        sentences.append(
            f"Greedy accuracy on held-out questions changed from {before:.2f} to {after:.2f}{_error(summary)}."
        )
        margin = _margin(summary, before, after)
        if margin is not None and abs(after - before) <= margin:
            sentences.append("This change is within the noise of the measurement.")
    elif before is not None:
        sentences.append(f"Greedy accuracy on held-out questions was {before:.2f}; there is no final evaluation.")
    elif after is not None:
        sentences.append(f"Greedy accuracy on held-out questions is {after:.2f}; the first is not measured.")
    what = "No reward of a trained trajectory is known." if summary.get("optimizer_steps") else ""
    return " ".join(sentences) or what or "No trajectory was trained."


def verdicts(summary: RunSummary, folder: Path) -> list[str]:
    """Return all verdicts that apply to the run in `folder`."""
    found = (
        error_verdict(summary, folder),
        refused_verdict(summary, folder),
        learning_verdict(summary),
        training_verdict(summary),
        late_verdict(summary),
        unmeasured_verdict(summary),
        warm_start_verdict(summary),
        audit_verdict(summary),
    )
    return [text for text in found if text]


def is_failing(summary: RunSummary) -> bool:
    """Return whether as many trajectories have an error as `run.stop_error_share`: then nothing was learned."""
    share = summary.get("error_share")
    return share is not None and share >= (summary.get("stop_error_share") or 1.0)


def outcome(summary: RunSummary) -> str:
    """Return how the run has ended; empty while it runs."""
    if is_failing(summary):
        return "FAILED: its trajectories have errors"
    reached = summary.get("reached")
    return "" if reached is None else "reached its goal" if reached else "ended before its goal"


def error_verdict(summary: RunSummary, folder: Path) -> str | None:
    """Return the share of trajectories with an error, by kind, and the first error; None without errors."""
    counts = ErrorCounts(
        summary.get("trajectories_scored") or 0, *(summary.get(name) or 0 for name in ErrorCounts._fields[1:])
    )
    if not (text := errors_text(counts)):
        return None
    effect = "They were not trained."
    if summary.get("failures_rewarded"):
        effect = "They were trained with score.on_error where that is set, and not trained elsewhere."
    tasks = {task: TaskErrors(**values) for task, values in (summary.get("errors_by_task") or {}).items()}
    which = f", {found}" if (found := which_errors(tasks)) else ""
    command = run_command(folder, "topics find experiences", "-w \"reward_error != ''\"")
    return f"Errors in {text}{which}. {effect} `{command}` lists them."


def refused_verdict(summary: RunSummary, folder: Path) -> str | None:
    """Return how many rows were refused, by kind; None without any."""
    kinds = summary.get("refused_rows") or {}
    text = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
    return (
        f"Refused rows of the prompts: {text}; `{run_command(folder, 'topics dlq list')}` lists them." if text else None
    )


def learning_verdict(summary: RunSummary) -> str | None:
    """Return the signs that the run did not learn; None without any."""
    found = "; ".join(summary.get("warnings") or ())
    return f"Warning: {found}." if found else None


def late_verdict(summary: RunSummary) -> str | None:
    """Return that the initial version was not evaluated; None if it was."""
    first = summary.get("heldout_first_version")
    if not first:
        return None
    return (
        f"The initial version was not evaluated: the first evaluation is of version {first}, because the role "
        "evaluation started later. Start it before or together with the trainer."
    )


def unmeasured_verdict(summary: RunSummary) -> str | None:
    """Return the rounds of evaluation that have no accuracy; None if all have one."""
    rounds = summary.get("heldout_unmeasured") or ()
    if not rounds:
        return None
    return (
        f"Not measured: {', '.join(rounds)}. An accuracy needs answers to 95 % of the held-out questions; an episode "
        "or a reward that failed is none, and questions remain when a version is gone or replicas fail."
    )


def warm_start_verdict(summary: RunSummary) -> str | None:
    """Return the comparison of the final model with the best supervised checkpoint; None if either is not known."""
    best, before, after = (summary.get(key) for key in ("heldout_warm_start_best", "heldout_before", "heldout_after"))
    if best is None or before is None or after is None:
        return None
    lines = []
    if habit := summary.get("warm_start_habit_share"):
        lines.append(
            f"The warm start first taught worked answers (accuracy {best:.2f} at its best checkpoint) and then, on "
            f"purpose, a bad habit: answers without work in {habit:.0%} of the examples, which left {before:.2f}."
        )
        if after - before > (_margin(summary, before, after) or 0.0):
            lines.append("Reinforcement learning from the verifier alone reduced the bad habit.")
    margin = _margin(summary, best, after) or 0.0
    if after > best + margin:
        errors = f", {2 * (after - best) / margin:.0f} standard errors of the difference" if margin else ""
        lines.append(
            f"The final accuracy is {after:.2f}, above every measured supervised checkpoint: {after - best:.2f} above "
            f"the best ({best:.2f}){errors}."
        )
        lines += _in_the_data(summary.get("warm_start_careful_share"))
    elif after >= best - margin:
        lines.append(
            f"The final accuracy is {after:.2f}, equal to the best supervised checkpoint ({best:.2f}) within the noise."
        )
    else:
        lines.append(f"The final accuracy is {after:.2f}, below the best supervised checkpoint ({best:.2f}).")
    return " ".join(lines)


def _in_the_data(careful: float | None) -> list[str]:
    """Return the share of careful examples in the warm start, if its teachers differed."""
    if careful is None or not 0 < careful < 1:
        return []
    return [
        f"The warm start's examples contained the correct method: a careful teacher wrote {careful:.0%} of them "
        f"(warm_start.careless_share = {1 - careful:g})."
    ]


def audit_verdict(summary: RunSummary) -> str:
    """Return the result of the audit."""
    if summary.get("audit_passed") is None:
        return "The run was not audited."
    if summary["audit_passed"]:
        return "The audit passed: no trajectory lost or trained twice."
    return (
        f"The audit FAILED: {summary.get('lost')} lost, {summary.get('trained_twice')} trained twice; "
        "audit.json lists the trajectories."
    )


def _error(summary: RunSummary) -> str:
    questions, after = summary.get("heldout_questions"), summary["heldout_after"]
    return f" ({questions} questions, standard error {standard_error(after, questions):.2f})" if questions else ""


def _margin(summary: RunSummary, one: float, other: float) -> float | None:
    """Return two standard errors of the difference of two accuracies; None if the number of questions is unknown."""
    questions = summary.get("heldout_questions")
    if not questions:
        return None
    return 2 * math.hypot(standard_error(one, questions), standard_error(other, questions))
