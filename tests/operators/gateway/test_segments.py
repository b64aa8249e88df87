"""Which conversations of an episode are trained, and what its turns are as a tree."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from operators.gateway import segments
from operators.gateway.reports import AgentReport
from operators.gateway.segments import segments_of
from operators.gateway.turn_tree import CompleteTurn, leaf_turns, times_of
from schemas.columns import token_ids
from schemas.records import Branches, TokenRange, TurnEnded, TurnRequest

TOKENS = np.arange(100, dtype=np.int32)
BIG = 10**6


def turn(start: int, new: int, drawn: int, *context: tuple[int, int]) -> CompleteTurn:
    """A turn of `new` tokens and `drawn` tokens of response after `context`."""
    ranges, said = tuple(TokenRange(*each) for each in context), json.dumps([{"role": "user", "content": f"u{start}"}])
    name, stop = f"t{start}", start + new + drawn
    request = TurnRequest(
        *("p0.0", 1, 0, 1, name, name, start, ranges, token_ids(range(new)), 8, (), said, "[]", False, 0)
    )
    return CompleteTurn(request, TurnEnded("p0.0", 1, 0, 1, name, start, stop, "stop", None, 0))


FIRST = turn(0, 2, 3)  # 0 1 | 2 3 4
LEFT = turn(5, 1, 2, (0, 5))  # 5 | 6 7
RIGHT = turn(8, 1, 1, (0, 5))  # 8 | 9
AGENT = turn(10, 2, 2)  # a sub-agent: 10 11 | 12 13
TURNS = [FIRST, LEFT, RIGHT, AGENT]


def drawn_of(turns: list[CompleteTurn]) -> np.ndarray:
    mask = np.zeros(len(TOKENS), bool)
    for each in turns:
        mask[each.given : each.ended.stop] = True
    return mask


def answer(request: TurnRequest, tokens: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": str(list(tokens))}


def selected(branches: Branches, most: int = BIG, turns: list[CompleteTurn] = TURNS) -> list[tuple[int, list[Any]]]:
    found = segments_of(turns, TOKENS, drawn_of(turns), answer, branches, most).segments
    return [(each.prompt_tokens, [(r.start, r.stop) for r in each.ranges]) for each in found]


def test_leaves_are_the_turns_that_no_turn_continues() -> None:
    assert leaf_turns(TURNS) == [LEFT, RIGHT, AGENT]
    assert leaf_turns([FIRST, turn(5, 0, 3, (0, 2))]) == [FIRST, turn(5, 0, 3, (0, 2))], "two responses to one request"


@pytest.mark.parametrize(
    ("branches", "most", "expected"),
    [
        ("last", BIG, [(2, [(10, 14)])]),
        ("all", BIG, [(2, [(10, 14)]), (2, [(0, 5), (8, 10)]), (2, [(0, 8)])]),
        ("tree", BIG, [(2, [(10, 14)]), (2, [(0, 5), (8, 10)]), (2, [(0, 8)])]),
        ("all", 11, [(2, [(10, 14)]), (2, [(0, 5), (8, 10)])]),
        ("all", 1, [(2, [(10, 14)])]),
    ],
)
def test_segments_follow_the_policy_and_the_bound(branches: Branches, most: int, expected: list[Any]) -> None:
    assert selected(branches, most) == expected


def test_turn_without_tokens_is_in_no_segment() -> None:
    assert selected("tree", turns=[FIRST, turn(5, 0, 0, (0, 5)), LEFT]) == [(2, [(0, 8)])]


def test_segments_have_the_messages_of_their_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(segments_of(TURNS, TOKENS, drawn_of(TURNS), answer, "all", BIG).messages)
    contents = [[message["content"] for message in each] for each in found]
    assert contents == [["u10", "[12, 13]"], ["u0", "[2, 3, 4]", "u8", "[9]"], ["u0", "[2, 3, 4]", "u5", "[6, 7]"]]
    monkeypatch.setattr(segments, "MAX_MESSAGES_CHARACTERS", 100)
    found = json.loads(segments_of(TURNS, TOKENS, drawn_of(TURNS), answer, "all", BIG).messages)
    assert [each is None for each in found] == [False, True, True], "too long messages are left out"


def test_two_responses_to_one_request_have_its_messages() -> None:
    second = replace(turn(5, 0, 2, (0, 2)).request, messages="[]")
    turns = [FIRST, CompleteTurn(second, turn(5, 0, 2, (0, 2)).ended)]
    for known, expected in ((turns, ["u0", "[5, 6]"]), (turns[1:], ["[5, 6]"])):
        found = json.loads(segments_of(known, TOKENS, drawn_of(turns), answer, "last", BIG).messages)
        assert [each["content"] for each in found[0]] == expected


def test_no_turns_give_no_segments() -> None:
    assert selected("all", turns=[]) == []


@pytest.mark.parametrize(
    ("turns", "ended", "expected"),
    [
        ([], 5000, (4.0, 0.0, 0.0)),
        ([(2000, 3000)], 5000, (1.0, 1.0, 2.0)),
        ([(2000, 3000), (2500, 4000)], 5000, (1.0, 2.0, 1.0)),
        ([(2000, 4000), (2500, 3000), (4500, 5000)], 5000, (1.0, 2.5, 0.5)),
    ],
)
def test_times_of_an_episode_count_overlapping_turns_once(turns: Any, ended: int, expected: tuple[float, ...]) -> None:
    assert times_of(1000, turns, ended) == expected


@pytest.mark.parametrize(
    ("branches", "report", "expected"),
    [
        ("all", AgentReport(reward=1.0), None),
        ("all", AgentReport(rewards={"t8": 0.5, "t5": -1.0, "t10": 2.0}), (2.0, 0.5, -1.0)),
        ("all", AgentReport(rewards={"t0": 0.25, "t8": 0.5}), (0.0, 0.5, 0.25)),  # the first turn is in two of them
        ("tree", AgentReport(reward=0.75, rewards={"t5": -1.0}), (0.75, 0.75, -1.0)),
        ("last", AgentReport(rewards={"t5": -1.0}), None),  # of a conversation that is not trained
        ("last", AgentReport(rewards={"t10": 3.0}), (3.0,)),
    ],
)
def test_conversation_has_the_reward_of_its_last_named_turn(
    branches: Branches, report: AgentReport, expected: tuple[float, ...] | None
) -> None:
    found = segments_of(TURNS, TOKENS, drawn_of(TURNS), answer, branches, BIG, report)
    assert found.rewards == expected
