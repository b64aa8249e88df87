"""Parses answers and tool calls in a model's text, and checks answers."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

ANSWER_MARK = "#"
_MAX_CHARS = 64


def is_correct(text: str, reference: Mapping[str, Any]) -> bool:
    """Whether the text after the last `#` of `text` (all of it if there is none) equals the `answer` of `reference`.

    Numbers are compared as numbers. Raises ValueError if the reference has no answer.
    """
    accepted = reference.get("answer")
    if accepted is None:
        raise ValueError("the reference has no answer")
    answer, expected = text.rpartition(ANSWER_MARK)[2].strip(), str(accepted).strip()
    number = parse_number(answer)
    return answer == expected or (number is not None and number == parse_number(expected))


def parse_number(text: str) -> Fraction | None:
    """`text` as a number; None if it is not one."""
    try:
        return Fraction(text) if len(text) <= _MAX_CHARS and "e" not in text.lower() else None
    except (ValueError, ZeroDivisionError):
        return None


def last_call(text: str, name: str) -> str | None:
    """The content of the last `<name>…</name>` in `text`; None if `text` has no call.

    A call without its opening or closing tag counts as an empty one.
    """
    opening, closing = f"<{name}>", f"</{name}>"
    if opening not in text and closing not in text:
        return None
    before, closed, _ = text.rpartition(closing)
    return before.rpartition(opening)[2] if closed and opening in before else ""
