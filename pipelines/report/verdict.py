"""What a run's figures say, in words: computed from the numbers, and no more than they allow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Summary = Mapping[str, Any]


def standard_error(accuracy: float, questions: int) -> float:
    """Of an accuracy measured on so many independent questions."""
    return math.sqrt(max(accuracy * (1 - accuracy), 0.0) / questions)


def learned(summary: Summary) -> str:
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


def compared_with_warm_start(summary: Summary) -> str | None:
    """How the model stands to the best supervised checkpoint it could have stopped at; None where that is not known."""
    best, before, after = (summary.get(key) for key in ("heldout_warm_start_best", "heldout_before", "heldout_after"))
    if best is None or before is None or after is None:
        return None
    margin = _margin(summary, best, after) or 0.0
    drop = best - before
    lines = []
    if drop > (_margin(summary, best, before) or 0.0):
        lines.append(
            f"What the rise is: the warm start first taught worked answers ({best:.2f} at its best checkpoint), "
            f"then, on purpose, a bad habit, mostly bare answers, which left {before:.2f}. Reinforcement learning "
            "found that showing its work pays, and undid the habit."
        )
    if after > best + margin:
        beyond = "beyond undoing the habit it learned" if lines else "it learned"
        lines.append(
            f"It ended at {after:.2f}, above the best supervised checkpoint ({best:.2f}) by more than the noise: "
            f"{beyond} something that the supervised phase had not taught."
        )
    elif after >= best - margin:
        lines.append(
            f"It ended at {after:.2f}, level with the best supervised checkpoint ({best:.2f}) within the noise: "
            "nothing shows that it learned what the supervised phase had not taught."
        )
    else:
        lines.append(
            f"It ended at {after:.2f}, below the best supervised checkpoint ({best:.2f}): it did not learn "
            "anything that the supervised phase had not taught."
        )
    return " ".join(lines)


def accounted(summary: Summary) -> str:
    """What the audit says."""
    if summary.get("balanced") is None:
        return "The run was not audited."
    if summary["balanced"]:
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
