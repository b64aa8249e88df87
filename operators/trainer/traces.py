"""Worked answers to reasoning-gym questions, as a teacher writes them: the steps, then `#` and the answer.

Pure functions of a dataset entry (its `metadata` holds the numbers) and of a random generator for the teacher's errors.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

ANSWER_MARK = "#"

Entry: TypeAlias = Mapping[str, Any]
Trace: TypeAlias = Callable[[Entry, random.Random, float], str]


def chain_sum_trace(entry: Entry, rng: random.Random, slip_rate: float = 0.0) -> str:
    """Running sums, `4-1=3;3-7=-4;#-4` for 4 - 1 - 7.

    At each sum that changes the tens or the sign, the teacher makes an error with probability `slip_rate`: it keeps the
    previous tens or sign, and continues from there.
    """
    first, *rest = entry["metadata"]["expression"].split()
    value = int(first)
    steps = []
    for operator, term in zip(rest[::2], rest[1::2], strict=True):
        result = value + int(term) if operator == "+" else value - int(term)
        mistaken = without_carry(value, result)
        if mistaken != result and rng.random() < slip_rate:
            result = mistaken
        steps.append(f"{value}{operator}{term}={result};")
        value = result
    return f"{''.join(steps)}{ANSWER_MARK}{value}"


def without_carry(before: int, after: int) -> int:
    """`after` without the carry, the borrow or the sign: 8→13 gives 3, 12→7 gives 17, 3→−4 gives 4."""
    if (before < 0) != (after < 0):
        return -after
    magnitude = abs(before) // 10 * 10 + abs(after) % 10
    return -magnitude if after < 0 else magnitude


def gcd_trace(entry: Entry, rng: random.Random, slip_rate: float = 0.0) -> str:
    """Euclid's algorithm by subtraction, `49 29;29 20;20 9;11 9;9 2;…;1 1;#1`: the larger number first on each line.

    At each line before the last, the teacher stops with probability `slip_rate` and gives the smaller number as the
    answer.
    """
    larger, smaller = sorted(entry["metadata"]["numbers"], reverse=True)
    steps = [f"{larger} {smaller};"]
    while larger != smaller and rng.random() >= slip_rate:
        larger, smaller = max(smaller, larger - smaller), min(smaller, larger - smaller)
        steps.append(f"{larger} {smaller};")
    return f"{''.join(steps)}{ANSWER_MARK}{smaller}"


def spell_backward_trace(entry: Entry, rng: random.Random, slip_rate: float = 0.0) -> str:
    """The letters from last to first, `#nus` for sun. The teacher omits each letter with probability `slip_rate`."""
    letters = [letter for letter in reversed(entry["metadata"]["word"]) if rng.random() >= slip_rate]
    return f"{ANSWER_MARK}{''.join(letters)}"


def calculator_trace(entry: Entry) -> tuple[str, str, str]:
    """A call of the calculator, its result, and the answer: `<calc>4-1</calc>`, `<result>3</result>`, `#3`."""
    answer = entry["answer"]
    return f"<calc>{entry['metadata']['expression']}</calc>", f"<result>{answer}</result>", f"{ANSWER_MARK}{answer}"


TRACES: dict[str, Trace] = {"chain_sum": chain_sum_trace, "gcd": gcd_trace, "spell_backward": spell_backward_trace}


def bare_answer(entry: Entry) -> str:
    """The answer without steps, `#-4`."""
    return f"{ANSWER_MARK}{entry['answer']}"


def answer_of(text: str) -> str | None:
    """The text after the last answer mark, None without one. Rewards parse responses in the same way."""
    _, mark, answer = text.rpartition(ANSWER_MARK)
    return answer.strip() if mark else None
