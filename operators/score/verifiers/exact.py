"""Checks whether the answer equals one of the accepted answers as text."""

from __future__ import annotations

from collections.abc import Sequence


def verify(answer: str | None, accepted: Sequence[str], ignore_case: bool = False) -> float:
    """1 if `answer` equals one of `accepted` up to white space; else 0."""
    if answer is None:
        return 0.0
    folded = _fold(answer, ignore_case)
    return float(any(folded == _fold(item, ignore_case) for item in accepted))


def _fold(text: str, ignore_case: bool) -> str:
    text = " ".join(text.split())
    return text.casefold() if ignore_case else text
