"""The score of one response, with the code of operators/score, for sides of a benchmark that are not a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from operators.score.attempt import Attempt, Extraction, extract_answer
from operators.score.rewards import make_judge

Scorer = Callable[[str, int, str, str, Mapping[str, Any]], float]
"""The reward of a response: its text, its tokens, its prompt, its task, and the reference of its question."""


def scorer(answer_marker: str, reward: str = "reasoning_gym", options: Mapping[str, Any] | None = None) -> Scorer:
    """A scorer that calls the verifier `reward` on the answer after the last `answer_marker`."""
    judge = make_judge(reward, options or {})
    extraction = Extraction("marker", answer_marker)

    def score(text: str, tokens: int, prompt: str, task: str, reference: Mapping[str, Any]) -> float:
        try:
            attempt = Attempt(text, extract_answer(text, extraction), tokens, prompt, task, reference)
            return float(judge(attempt))
        except Exception:  # noqa: BLE001 - verifiers raise anything on malformed text; a run counts that as 0 too
            return 0.0

    return score
