"""Checks whether the answer is the accepted number, in any notation."""

from __future__ import annotations

import math
from collections.abc import Sequence

_MAX_LETTERS = 64
_SIGNS = str.maketrans({"−": "-", "$": None, "€": None, "£": None, ",": None, "_": None, " ": None})


def verify(answer: str | None, accepted: Sequence[str], tolerance: float = 1e-6) -> float:
    """1 if `answer` is a number within `tolerance` (relative, and absolute below 1) of one of `accepted`; else 0.

    Raises ValueError if no accepted answer is a number.
    """
    targets = [number for number in map(parse_number, accepted) if number is not None]
    if not targets:
        raise ValueError(f"the reference answer {accepted[0][:40]!r} is not a number")
    value = None if answer is None else parse_number(answer)
    if value is None:
        return 0.0
    return float(any(math.isclose(value, target, rel_tol=tolerance, abs_tol=tolerance) for target in targets))


def parse_number(text: str) -> float | None:
    """The finite number in `text`; it may have thousands separators, a currency sign, per cent, a fraction or a final
    dot. None if it is not a number."""
    text = text.strip()
    if not text or len(text) > _MAX_LETTERS:
        return None
    text = text.translate(_SIGNS).rstrip(".")
    scale = 1.0
    if text.endswith("%"):
        text, scale = text[:-1], 0.01
    numerator, slash, denominator = text.partition("/")
    try:
        value = float(numerator) / (float(denominator) if slash else 1.0) * scale
    except (ValueError, ZeroDivisionError):
        return None
    return value if math.isfinite(value) else None
