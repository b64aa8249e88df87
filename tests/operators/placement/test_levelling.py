"""Tables of loads, and the waiting requests that run elsewhere at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_repack import LOADS, load

from operators.placement.plans import plan_record
from operators.placement.queue_balancing import plan_queue_balancing
from operators.placement.repack import Load, Move, plan_repack
from schemas.records import PolicyVersion

FRESH = 10
FULL = {"kv": 95, "requests": 40}


def levelled(*loads: Load, moves: tuple[Move, ...] = (), idle_too: bool = False) -> list[tuple[int, int, int]]:
    found = plan_queue_balancing(loads, moves, FRESH, 0.9, idle_too=idle_too)
    assert all(move.waiting and move.kv == 0 for move in found)
    return [(move.source, move.destination, move.requests) for move in found]


def test_what_waits_goes_where_it_can_run_at_once() -> None:
    queue = load(0, **FULL, waiting=20)
    assert levelled(queue) == []
    assert levelled(queue, load(1, 40)) == [(0, 1, 5)]  # 50 of KV are free, ten for each
    assert levelled(queue, load(1, 40, 5)) == [(0, 1, 3)]  # eight requests at most
    assert levelled(queue, load(1, 40, growth=25)) == [(0, 1, 2)]
    assert levelled(queue, load(1, 40), load(2, 20)) == [(0, 2, 6), (0, 1, 5)]  # the emptiest first
    assert levelled(queue, load(1, 85)) == []
    assert levelled(queue, load(1, 40, waiting=1)) == []  # it has a queue of its own
    assert levelled(queue, load(1, 0, 0)) == []  # it is free for newer weights
    assert levelled(queue, load(1, 0, 0), idle_too=True) == [(0, 1, 8)]
    assert levelled(queue, load(1, 40, leaving=True)) == []


def test_a_short_queue_is_served_where_it_is() -> None:
    assert levelled(load(0, 95, 20, waiting=2), load(1, 40)) == []  # one in eight of those that run, rounded up: 3
    assert levelled(load(0, 95, 20, waiting=4), load(1, 40)) == [(0, 1, 2)]


def test_the_longest_queue_gives_first() -> None:
    long, longer = load(0, **FULL, waiting=20), load(1, **FULL, waiting=21)
    assert levelled(long, longer, load(2, 0, 1), load(3, 0, 1)) == [(1, 3, 7), (0, 2, 7)]


def test_a_queue_shorter_than_all_room_is_shared_out_once() -> None:
    queue = load(0, 95, 10, waiting=9)
    assert levelled(queue, load(1, 0, 1), load(2, 0, 1)) == [(0, 2, 7), (0, 1, 1)]


def test_who_leaves_gives_no_queue_away() -> None:
    assert levelled(load(0, **FULL, waiting=20, leaving=True), load(1, 40)) == []


@pytest.mark.parametrize("move", [Move(0, 9, 40, 20), Move(9, 0, 1, 20), Move(1, 9, 2, 40), Move(9, 1, 1, 20)])
def test_who_gives_or_gets_in_the_same_plan_is_left_alone(move: Move) -> None:
    assert levelled(load(0, **FULL, waiting=20), load(1, 40), moves=(move,)) == []


@given(LOADS, st.integers(1, 40))
@settings(max_examples=300, deadline=None)
def test_whatever_the_loads_nobody_gives_and_gets_or_takes_more_than_fits(drawn: list[dict], fresh: int) -> None:
    loads = {i: load(i, fields.pop("kv"), fields.pop("requests"), **fields) for i, fields in enumerate(drawn)}
    moves = plan_repack(list(loads.values()), 0.9)
    every = [*moves, *plan_queue_balancing(list(loads.values()), moves, fresh, 0.9)]
    assert not {m.source for m in every} & {m.destination for m in every}
    for move in every:
        if move.waiting:
            to, coming = loads[move.destination], [m for m in every if m.destination == move.destination]
            assert to.kv_used + sum(m.requests * fresh if m.waiting else m.kv for m in coming) <= 90
            assert to.requests + sum(m.requests for m in coming) <= to.most_requests
    for load_ in loads.values():
        assert sum(m.requests for m in every if m.source == load_.replica and m.waiting) <= load_.waiting


def test_a_plan_names_the_oldest_of_who_is_emptied_and_the_youngest_of_a_queue() -> None:
    loads = [load(0, 10, 3), load(1, 40), load(2, 95, 6)]
    moves = [Move(0, 1, 2, 6), Move(0, 2, 1, 3), Move(2, 1, 2, 0, waiting=True), Move(2, 1, 1, 0, waiting=True)]
    names = {0: ["a", "b", "c"], 2: ["k", "l", "m", "n", "o", "p"]}
    plan = plan_record("1-1", PolicyVersion(1, 0), loads, moves, names.__getitem__, 0)
    assert [move.trajectory_ids for move in plan.moves] == [("a", "b"), ("c",), ("o", "p"), ("n",)]
    assert plan.reason == "repack"
    assert plan_record("1-2", PolicyVersion(1, 0), loads, moves[2:], names.__getitem__, 0).reason == "balance"
