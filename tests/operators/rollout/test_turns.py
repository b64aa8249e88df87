"""Turns told from a loss mask, and where a turn ends by its text."""

from __future__ import annotations

import numpy as np
import pytest

from operators.rollout.engine import Partial
from operators.rollout.turns import Stops, marked, observations_of, observed, turns_of


@pytest.mark.parametrize(
    ("mask", "turns", "observations"),
    [
        ([], [], []),
        ([0, 0], [], []),
        ([1, 1], [(0, 2)], [(0, 0)]),
        ([0, 1, 1, 0, 1], [(1, 3), (4, 5)], [(0, 1), (3, 4)]),
        ([1, 0, 0], [(0, 1)], [(0, 0)]),
    ],
)
def test_turns_are_runs_of_what_was_drawn(
    mask: list[int], turns: list[tuple[int, int]], observations: list[tuple[int, int]]
) -> None:
    drawn = np.array(mask, bool)
    assert turns_of(drawn) == [range(*turn) for turn in turns]
    assert observations_of(drawn) == [range(*each) for each in observations]


def partial(*token_ids: int) -> Partial:
    return Partial(np.array(token_ids, np.int32), np.full(len(token_ids), -0.5, np.float32))


def test_what_is_observed_is_masked_and_what_follows_is_not() -> None:
    known = observed(partial(1, 2), [7, 8])
    assert (known.token_ids.tolist(), known.logprobs.tolist()) == ([1, 2, 7, 8], [-0.5, -0.5, 0.0, 0.0])
    whole = partial(1, 2, 7, 8, 3)
    assert marked(whole, known).drawn.tolist() == [True, True, False, False, True]
    for start in range(6):
        assert marked(whole.since(start), known, start).drawn.tolist() == [True, True, False, False, True][start:]


def decode(token_ids: list[int]) -> str:
    return bytes(token_ids).decode(errors="replace")


@pytest.mark.parametrize(
    ("strings", "text", "end"),
    [
        ((), "abc", None),
        (("</c>",), "<c>1</c", None),
        (("</c>",), "<c>1</c>", 8),
        (("</c>",), "</c></c>", 4),
        (("x", "b"), "abx", 2),
        (("é",), "caé!", 4),
    ],
)
def test_a_turn_ends_with_the_token_that_completes_a_stop_string(
    strings: tuple[str, ...], text: str, end: int | None
) -> None:
    stops, token_ids = Stops(strings, decode), np.frombuffer(text.encode(), np.uint8)
    assert stops.end(token_ids) == end
    if end is not None:
        assert stops.may_end(token_ids[end - 1 : end])
        assert not stops.may_end(token_ids[:1]) or end == 1
