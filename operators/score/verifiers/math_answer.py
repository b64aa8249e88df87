"""Checks whether two formulas are equal, with math-verify, which parses LaTeX and compares with sympy."""

from __future__ import annotations

from collections.abc import Sequence


def verify(answer: str | None, accepted: Sequence[str]) -> float:
    """1 if `answer` equals one of `accepted` as a mathematical expression, else 0.

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
