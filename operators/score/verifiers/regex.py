"""Checks whether the response matches a pattern."""

from __future__ import annotations

import re


def verify(text: str, pattern: str) -> float:
    """1 if `pattern` (Python's syntax, dot matches newlines) is found in `text`, else 0.

    A pattern may backtrack for ever, so it must run in a process of its own.
    """
    return float(re.search(pattern, text, re.DOTALL) is not None)
