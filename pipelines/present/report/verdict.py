"""What a run's figures say, in words: computed from the numbers, and no more than they allow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Summary = Mapping[str, Any]


def standard_error(accuracy: float, questions: int) -> float:
    """Of an accuracy measured on so many independent questions."""
    return math.sqrt(max(accuracy * (1 - accuracy), 0.0) / questions)


def training_verdict(summary: Summary) -> str:
    """What became of the reward and of held-out accuracy."""
    sentences = []
    first, last = summary.get("reward_first"), summary.get("reward_last")
    if first is not None and last is not None:
        sentences.append(
            f"Training reward went from {first:.2f} to {last:.2f} (the first and the last tenth of the trajectories)."
        )
    before, after = summary.get("heldout_before"), summary.get("heldout_after")
    if before is not None and after is not None:
        sentences.append(
            f"Greedy accuracy on held-out questions went from {before:.2f} to {after:.2f}{_error(summary)}."
        )
        margin = _margin(summary, before, after)
        if margin is not None and abs(after - before) <= margin:
            sentences.append("That is within the noise of the measurement.")
    elif before is not None:
        sentences.append(f"Greedy accuracy on held-out questions was {before:.2f}; there is no final evaluation.")
    return " ".join(sentences) or "Nothing was trained."


def warm_start_verdict(summary: Summary) -> str | None:
    """How the model stands to the best supervised checkpoint it could have stopped at; None where that is not known."""
    best, before, after = (summary.get(key) for key in ("heldout_warm_start_best", "heldout_before", "heldout_after"))
    if best is None or before is None or after is None:
        return None
    lines = []
    if habit := summary.get("warm_start_habit_share"):
        lines.append(
            f"The warm start first taught worked answers ({best:.2f} at its best checkpoint), then, on purpose, a bad "
            f"habit, bare answers in {habit:.0%} of its examples, which left {before:.2f}."
        )
        if after - before > (_margin(summary, before, after) or 0.0):
            lines.append("Reinforcement learning from the verifier alone has worked against the habit.")
    margin = _margin(summary, best, after) or 0.0
    if after > best + margin:
        errors = f", {2 * (after - best) / margin:.0f} standard errors of the difference" if margin else ""
        lines.append(
            f"It ended at {after:.2f}, above every supervised checkpoint that was measured: {after - best:.2f} above "
            f"the best ({best:.2f}){errors}."
        )
        lines += _in_the_data(summary.get("warm_start_careful_share"))
    elif after >= best - margin:
        lines.append(
            f"It ended at {after:.2f}, level with the best supervised checkpoint ({best:.2f}) within the noise."
        )
    else:
        lines.append(f"It ended at {after:.2f}, below the best supervised checkpoint ({best:.2f}).")
    return " ".join(lines)


def _in_the_data(careful: float | None) -> list[str]:
    """What a rise above supervision could build on, where the teachers differed."""
    if careful is None or not 0 < careful < 1:
        return []
    return [
        f"The right way of working was in the warm start's examples: a careful teacher wrote {careful:.0%} of them "
        f"(warm_start.careless_share = {1 - careful:g})."
    ]


def audit_verdict(summary: Summary) -> str:
    """What the audit says."""
    if summary.get("audit_passed") is None:
        return "The run was not audited."
    if summary["audit_passed"]:
        return "The audit balances: every trajectory is accounted for, none was lost and none trained twice."
    return (
        f"The audit does NOT balance: {summary.get('lost')} lost, {summary.get('trained_twice')} trained twice; "
        "audit.json names them."
    )


def _error(summary: Summary) -> str:
    questions, after = summary.get("heldout_questions"), summary["heldout_after"]
    return f" ({questions} questions, standard error {standard_error(after, questions):.2f})" if questions else ""


def _margin(summary: Summary, one: float, other: float) -> float | None:
    """Two standard errors of the difference of two accuracies; None where the number of questions is not known."""
    questions = summary.get("heldout_questions")
    if not questions:
        return None
    return 2 * math.hypot(standard_error(one, questions), standard_error(other, questions))
