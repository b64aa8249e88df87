"""Episodes for agents elsewhere: each is claimed once, again after its time, and fails after its last attempt."""

from __future__ import annotations

import pytest
from record_factories import prompt, trajectory

from operators.gateway.claims import Claims, OtherProcess
from operators.gateway.episode_table import EpisodeTable
from operators.io.elements import ReceivedRecord
from schemas.columns import token_ids
from schemas.records import Assignment, TurnRequest


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def table(*numbers: int, started: tuple[int, ...] = ()) -> EpisodeTable:
    found = EpisodeTable(1, lambda turn, tokens: {}, lambda names: None)
    for offset, number in enumerate(numbers):
        assigned = Assignment(prompt(number, 1, environment="agent"), 0, 1, 1, 0, 1, None, None, 0)
        found.fold([ReceivedRecord("inbox", 0, offset, assigned)])
    for number in started:
        asked = TurnRequest(
            *(f"p{number}.0", 1, 0, 1, "t", "d", 0, (), token_ids([1]), 8, (), "[]", "[]", False, 0),
        )
        found.fold([ReceivedRecord("inbox", 0, 100 + number, asked)])
    return found


def claimed(claims: Claims) -> tuple[str, int] | None:
    found = claims.claim()
    return None if found is None else found[:2]


def test_each_episode_is_claimed_once_in_order() -> None:
    claims = Claims(table(0, 1), 0, 1, 10.0, 1, Clock())
    assert [claimed(claims) for _ in range(3)] == [("p0.0", 0), ("p1.0", 0), None]


def test_processes_hand_out_different_episodes() -> None:
    first, second = (Claims(table(0, 1), index, 2, 10.0, 1, Clock()) for index in (0, 1))
    assert [claimed(first), claimed(first)] == [("p0.0", 0), None]
    assert [claimed(second), claimed(second)] == [("p1.0", 0), None]
    with pytest.raises(OtherProcess):
        first.give_back("p1.0", 0, failed=True)


def test_expired_claim_is_handed_out_until_its_last_attempt() -> None:
    clock = Clock()
    claims = Claims(table(0), 0, 1, 10.0, 1, clock)
    assert claimed(claims) == ("p0.0", 0)
    clock.now = 10.0
    assert claimed(claims) == ("p0.0", 1)
    assert claims.failed() == []
    clock.now = 20.0
    assert claimed(claims) is None
    assert claims.failed() == ["p0.0"]


def test_an_episode_given_back_is_handed_out_at_once() -> None:
    claims = Claims(table(0), 0, 1, 10.0, 1, Clock())
    claims.claim()
    assert claims.give_back("p0.0", 0, failed=True)
    assert claimed(claims) == ("p0.0", 1)
    assert not claims.give_back("p0.0", 1, failed=True)


def test_an_agent_that_was_stopped_has_not_used_an_attempt() -> None:
    claims = Claims(table(0), 0, 1, 10.0, 0, Clock())
    for attempt in range(3):
        assert claimed(claims) == ("p0.0", attempt), "with a new number: a key counts the requests of an agent"
        assert claims.give_back("p0.0", attempt, failed=False)
    assert claims.failed() == []


def test_an_expired_attempt_cannot_end_the_one_after_it() -> None:
    clock = Clock()
    claims = Claims(table(0), 0, 1, 10.0, 1, clock)
    claims.claim()
    clock.now = 10.0
    assert claims.give_back("p0.0", 0, failed=True), "it has expired, and is not counted twice"
    assert claimed(claims) == ("p0.0", 1)
    assert claims.give_back("p0.0", 0, failed=True)
    assert claimed(claims) is None, "attempt 1 goes on"


@pytest.mark.parametrize(("retries", "after"), [(1, ("p0.0", 1)), (0, None)])
def test_new_gateway_delays_an_episode_with_turns(retries: int, after: tuple[str, int] | None) -> None:
    clock = Clock()
    claims = Claims(table(0, started=(0,)), 0, 1, 10.0, retries, clock)
    assert claimed(claims) is None
    clock.now = 10.0
    assert claims.failed() == ([] if retries else ["p0.0"])
    assert claimed(claims) == after


def test_a_finished_episode_is_not_handed_out() -> None:
    found = table(0)
    found.fold([ReceivedRecord("trajectories", 0, 0, trajectory(prompt(0, 1, environment="agent"), 0))])
    claims = Claims(found, 0, 1, 10.0, 1, Clock())
    assert claims.claim() is None
    assert not claims.give_back("p0.0", 0, failed=True)
