"""Numbers with their nouns."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`number` of `noun`, such as "1 row" and "1,000 rows"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
