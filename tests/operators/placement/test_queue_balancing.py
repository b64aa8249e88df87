"""Queue balancing: tables of loads and the moves of waiting requests."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_repack import LOADS, load

from operators.placement.moves import plan_record
from operators.placement.queue_balancing import plan_queue_balancing
from operators.placement.repack import KVLoad, Move, plan_repack
from schemas.records import PolicyVersion

FRESH = 10
FULL = {"kv": 95, "requests": 40}


def balanced(*loads: KVLoad, moves: tuple[Move, ...] = (), idle_too: bool = False) -> list[tuple[int, int, int]]:
    found = plan_queue_balancing(loads, moves, FRESH, 0.9, idle_too=idle_too)
    assert all(move.waiting and move.kv == 0 for move in found)
    return [(move.source, move.destination, move.requests) for move in found]


def test_balancing_moves_waiting_requests_to_free_replicas() -> None:
    queue = load(0, **FULL, waiting=20)
    assert balanced(queue) == []
    assert balanced(queue, load(1, 40)) == [(0, 1, 5)]  # 50 tokens of KV are free, ten per request
    assert balanced(queue, load(1, 40, 5)) == [(0, 1, 3)]  # eight requests at most
    assert balanced(queue, load(1, 40, growth=25)) == [(0, 1, 2)]
    assert balanced(queue, load(1, 40), load(2, 20)) == [(0, 2, 6), (0, 1, 5)]  # the emptiest receives first
    assert balanced(queue, load(1, 85)) == []
    assert balanced(queue, load(1, 40, waiting=1)) == []  # it has a queue of its own
    assert balanced(queue, load(1, 0, 0)) == []  # it is free for newer weights
    assert balanced(queue, load(1, 0, 0), idle_too=True) == [(0, 1, 8)]
    assert balanced(queue, load(1, 40, leaving=True)) == []


def test_balancing_ignores_short_queues() -> None:
    assert balanced(load(0, 95, 20, waiting=2), load(1, 40)) == []  # one per eight running, rounded up: 3
    assert balanced(load(0, 95, 20, waiting=4), load(1, 40)) == [(0, 1, 2)]


def test_balancing_takes_from_the_longest_queue_first() -> None:
    long, longer = load(0, **FULL, waiting=20), load(1, **FULL, waiting=21)
    assert balanced(long, longer, load(2, 0, 1), load(3, 0, 1)) == [(1, 3, 7), (0, 2, 7)]


def test_balancing_moves_each_request_once() -> None:
    queue = load(0, 95, 10, waiting=9)
    assert balanced(queue, load(1, 0, 1), load(2, 0, 1)) == [(0, 2, 7), (0, 1, 1)]


def test_balancing_skips_leaving_replicas() -> None:
    assert balanced(load(0, **FULL, waiting=20, leaving=True), load(1, 40)) == []


@pytest.mark.parametrize("move", [Move(0, 9, 40, 20), Move(9, 0, 1, 20), Move(1, 9, 2, 40), Move(9, 1, 1, 20)])
def test_balancing_skips_replicas_of_the_repack_plan(move: Move) -> None:
    assert balanced(load(0, **FULL, waiting=20), load(1, 40), moves=(move,)) == []


@given(LOADS, st.integers(1, 40))
@settings(max_examples=300, deadline=None)
def test_balancing_never_overfills_for_any_loads(drawn: list[dict], fresh: int) -> None:
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


def test_plan_names_the_oldest_requests_and_the_youngest_waiting() -> None:
    loads = [load(0, 10, 3), load(1, 40), load(2, 95, 6)]
    moves = [Move(0, 1, 2, 6), Move(0, 2, 1, 3), Move(2, 1, 2, 0, waiting=True), Move(2, 1, 1, 0, waiting=True)]
    names = {0: ["a", "b", "c"], 2: ["k", "l", "m", "n", "o", "p"]}
    plan = plan_record("1-1", PolicyVersion(1, 0), loads, moves, names.__getitem__, 0)
    assert [move.trajectory_ids for move in plan.moves] == [("a", "b"), ("c",), ("o", "p"), ("n",)]
    assert plan.reason == "repack"
    assert plan_record("1-2", PolicyVersion(1, 0), loads, moves[2:], names.__getitem__, 0).reason == "balance"
