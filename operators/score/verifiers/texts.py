"""The built-in verifiers of texts: pure functions from a response, or the answer in it, to a number."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_MAX_LETTERS = 64
_SIGNS = str.maketrans({"−": "-", "$": None, "€": None, "£": None, ",": None, "_": None, " ": None})


def equals_text(answer: str | None, accepted: Sequence[str], ignore_case: bool = False) -> float:
    """1 if `answer` equals one of `accepted` up to white space; else 0."""
    if answer is None:
        return 0.0
    folded = _fold(answer, ignore_case)
    return float(any(folded == _fold(item, ignore_case) for item in accepted))


def _fold(text: str, ignore_case: bool) -> str:
    text = " ".join(text.split())
    return text.casefold() if ignore_case else text


def equals_number(answer: str | None, accepted: Sequence[str], tolerance: float = 1e-6) -> float:
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


def equals_formula(answer: str | None, accepted: Sequence[str]) -> float:
    """1 if `answer` equals one of `accepted` as a mathematical expression (math-verify: LaTeX, sympy), else 0.

    It takes milliseconds to seconds, and sometimes never ends, so it must run in a process of its own. The time limit
    of that process replaces math-verify's own time-outs, which are alarm signals. Raises ValueError if no accepted
    answer can be parsed.
    """
    import math_verify

    def parse(text: str) -> list[object]:
        boxed = text if "\\boxed" in text else f"\\boxed{{{text}}}"
        targets = [math_verify.ExprExtractionConfig(), math_verify.LatexExtractionConfig()]
        return list(math_verify.parse(boxed, extraction_config=targets, parsing_timeout=None))

    gold = [parsed for parsed in map(parse, accepted) if parsed]
    if not gold:
        raise ValueError(f"the reference answer {accepted[0][:40]!r} is not a mathematical expression")
    if not answer:
        return 0.0
    given = parse(answer)
    return float(any(math_verify.verify(parsed, given, timeout_seconds=None) for parsed in gold))


def matches(text: str, pattern: str) -> float:
    """1 if `pattern` (Python's syntax, dot matches newlines) is found in `text`, else 0.

    A pattern may backtrack for ever, so it must run in a process of its own.
    """
    return float(re.search(pattern, text, re.DOTALL) is not None)


def has_tags(text: str, tags: Sequence[str] = ("think", "answer")) -> float:
    """1 if `text` is one block of each of `tags` in this order, with only white space between them; else 0.

    The format reward of DeepSeek-R1 (arXiv 2501.12948, 2.2.2), without a regular expression: linear in the text.
    """
    rest = text.strip()
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1 or not rest.startswith(opening):
            return 0.0
        _, found, rest = rest.partition(closing)
        if not found:
            return 0.0
        rest = rest.lstrip()
    return float(not rest)


def brevity(tokens: int, target: int, limit: int) -> float:
    """1 up to `target` tokens, 0 from `limit` on, linear between."""
    if tokens <= target:
        return 1.0
    return max(0.0, (limit - tokens) / (limit - target))


def soft_overlong(tokens: int, limit: int, buffer: int) -> float:
    """0 up to `limit - buffer` tokens, then linear to -1 at `limit`, and -1 beyond (DAPO, arXiv 2503.14476, eq. 13)."""
    return max(-1.0, min(0.0, (limit - buffer - tokens) / buffer))
