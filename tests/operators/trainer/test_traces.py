"""Worked answers of a teacher: correct without errors, and wrong in the documented way with errors."""

from __future__ import annotations

import random

import pytest

from operators.trainer.warm_start import (
    TRACES,
    answer_of,
    bare_answer,
    chain_sum_trace,
    gcd_trace,
    spell_backward_trace,
    without_carry,
)


def chain(expression: str) -> dict[str, object]:
    return {"metadata": {"expression": expression}}


def pair(*numbers: int) -> dict[str, object]:
    return {"metadata": {"numbers": list(numbers)}}


@pytest.mark.parametrize(
    ("entry", "trace"),
    [
        (chain("4 - 1 - 7"), "4-1=3;3-7=-4;#-4"),
        (chain("9 + 9"), "9+9=18;#18"),
        (chain("0 - 3 + 3"), "0-3=-3;-3+3=0;#0"),
        (chain("7"), "#7"),
    ],
)
def test_chain_sum_trace(entry: dict[str, object], trace: str) -> None:
    assert chain_sum_trace(entry, random.Random(0)) == trace


@pytest.mark.parametrize(
    ("entry", "trace"),
    [
        (pair(20, 49), "49 20;29 20;20 9;11 9;9 2;7 2;5 2;3 2;2 1;1 1;#1"),
        (pair(6, 6), "6 6;#6"),
        (pair(12, 4), "12 4;8 4;4 4;#4"),
    ],
)
def test_gcd_trace(entry: dict[str, object], trace: str) -> None:
    assert gcd_trace(entry, random.Random(0)) == trace


def test_spell_backward_trace_omits_letters_at_the_slip_rate() -> None:
    entry = {"metadata": {"word": "Sunny"}}
    assert spell_backward_trace(entry, random.Random(0)) == "#ynnuS"
    assert spell_backward_trace(entry, random.Random(0), 1.0) == "#"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [(8, 13, 3), (12, 7, 17), (3, -4, 4), (-3, 4, -4), (-8, -13, -3), (-12, -7, -17), (11, 14, 14), (28, 31, 21)],
)
def test_without_carry(before: int, after: int, expected: int) -> None:
    assert without_carry(before, after) == expected


def test_chain_sum_trace_continues_from_an_error() -> None:
    assert chain_sum_trace(chain("8 + 5 - 9"), random.Random(0), 1.0) == "8+5=3;3-9=6;#6"
    assert gcd_trace(pair(32, 19), random.Random(0), 1.0) == "32 19;#19"


def test_chain_sum_errors_have_their_rate_and_need_a_carry() -> None:
    source = random.Random(1)
    errors = [chain_sum_trace(chain("8 + 5"), source, 0.3) == "8+5=3;#3" for _ in range(4000)]
    assert sum(errors) / len(errors) == pytest.approx(0.3, abs=0.03)
    assert all(chain_sum_trace(chain("3 + 5"), source, 1.0) == "3+5=8;#8" for _ in range(20))


def test_gcd_trace_with_an_error_is_a_correct_prefix() -> None:
    whole = gcd_trace(pair(50, 7), random.Random(0))
    source = random.Random(1)
    ends = [gcd_trace(pair(50, 7), source, 0.2).partition("#")[0] for _ in range(3000)]
    assert all(whole.startswith(end) for end in ends)
    lines = [end.count(";") for end in ends]
    assert min(lines) == 1
    assert lines.count(1) / 3000 == pytest.approx(0.2, abs=0.03)
    assert lines.count(2) / 3000 == pytest.approx(0.16, abs=0.03)


@pytest.mark.parametrize(
    ("text", "answer"),
    [("1+1=2;#2", "2"), ("#-4", "-4"), ("# 7 ", "7"), ("#1;#2", "2"), ("", None), ("4", None), ("#", "")],
)
def test_answer_of(text: str, answer: str | None) -> None:
    assert answer_of(text) == answer


def test_bare_answer_round_trip() -> None:
    assert answer_of(bare_answer({"answer": "-12"})) == "-12"
    assert set(TRACES) == {"chain_sum", "gcd", "spell_backward"}
