"""Checks whether the response consists of the required tags."""

from __future__ import annotations

from collections.abc import Sequence


def verify(text: str, tags: Sequence[str] = ("think", "answer")) -> float:
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
