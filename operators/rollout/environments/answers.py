"""What a model says in the end, and whether it is right."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

ANSWER_MARK = "#"
_MAX_CHARS = 64


def is_correct(text: str, reference: Mapping[str, Any]) -> bool:
    """Whether what follows the last `#` of `text` (all of it where there is none) is the `answer` of `reference`.

    Numbers are compared as numbers. Raises ValueError where the reference has no answer.
    """
    accepted = reference.get("answer")
    if accepted is None:
        raise ValueError("the reference has no answer")
    said, right = text.rpartition(ANSWER_MARK)[2].strip(), str(accepted).strip()
    number = parse_number(said)
    return said == right or (number is not None and number == parse_number(right))


def parse_number(text: str) -> Fraction | None:
    """`text` as a number; None if it is none."""
    try:
        return Fraction(text) if len(text) <= _MAX_CHARS and "e" not in text.lower() else None
    except (ValueError, ZeroDivisionError):
        return None


def last_call(text: str, name: str) -> str | None:
    """What stands in the last `<name>…</name>` of `text`; None where `text` calls nothing.

    A call that is not begun, or not ended, is an empty one.
    """
    opening, closing = f"<{name}>", f"</{name}>"
    if opening not in text and closing not in text:
        return None
    before, closed, _ = text.rpartition(closing)
    return before.rpartition(opening)[2] if closed and opening in before else ""
