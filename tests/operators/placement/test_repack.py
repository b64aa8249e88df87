"""Repack: tables of loads and their moves, properties of any plan, and length statistics."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from operators.placement.length_statistics import WINDOW, LengthStatistics
from operators.placement.repack import KVLoad, is_idle, plan_repack


def load(replica: int, kv: int, requests: int = 2, **changes: object) -> KVLoad:
    fields: dict = {"kv_capacity": 100, "kv_before": None, "waiting": 0, "most_requests": 8}
    return KVLoad(replica, kv_used=kv, requests=requests, **(fields | changes))


def moves(*loads: KVLoad, **how: bool) -> list[tuple[int, int, int]]:
    return [(move.source, move.destination, move.requests) for move in plan_repack(loads, 0.9, **how)]


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([], []),
        ([load(0, 10)], []),
        ([load(0, 10), load(1, 20)], [(0, 1, 2)]),
        ([load(0, 0, 0), load(1, 20)], []),  # an idle replica is neither source nor destination
        ([load(0, 10), load(1, 20), load(2, 60)], [(0, 2, 2), (1, 2, 2)]),  # the fullest with room
        ([load(0, 10), load(1, 20), load(2, 75)], [(0, 2, 2)]),  # 1 no longer fits into 2, and 0 is gone
        ([load(0, 30), load(1, 40), load(2, 85)], [(0, 1, 2)]),  # 2 is too full; 1 receives, so it is no source
        ([load(0, 10, growth=30), load(1, 55, growth=30)], []),  # 10 plus the growth: 95 exceeds the limit
        ([load(0, 10, growth=20), load(1, 55)], [(0, 1, 2)]),
        ([load(0, 10, 5), load(1, 20, 4)], []),  # nine requests are too many
        ([load(0, 10, waiting=1), load(1, 20)], []),  # 0 is still filling
        (
            [load(0, 10, waiting=1, kv_before=15), load(1, 20)],
            [(0, 1, 2)],
        ),  # it is past its peak although a request waits
        ([load(0, 40, waiting=1, kv_before=40), load(1, 20)], []),
        ([load(0, 12, 1, kv_before=5), load(1, 20)], [(0, 1, 1)]),  # a straggler that still grows counts
        ([load(0, 10, 8), load(1, 20, 8)], []),  # at the maximum of requests
        ([load(0, 30, 6), load(1, 72, 6), load(2, 75, 6)], []),  # 33 tokens of KV are free, but only 4 requests
        ([load(0, 30, 4), load(1, 72, 6), load(2, 75, 6)], []),  # 8 tokens each: one and two fit
        (
            [load(0, 30, 3), load(1, 70, 6), load(2, 75, 6)],
            [(0, 2, 1), (0, 1, 2)],
        ),  # no replica takes all, but two together do
        ([load(0, 10), load(1, 30, 3), load(2, 70, 4), load(3, 70, 4)], [(0, 2, 2), (1, 2, 1), (1, 3, 2)]),
    ],
)
def test_repack_plans_moves_for_loads(loads: list[KVLoad], expected: list[tuple[int, int, int]]) -> None:
    assert moves(*loads) == expected


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([load(0, 30, leaving=True), load(1, 20), load(2, 50, 8)], [(0, 1, 2)]),
        ([load(0, 30, leaving=True), load(1, 20, waiting=3)], [(0, 1, 2)]),  # a busy replica receives too
        ([load(0, 30, leaving=True), load(1, 0, 0)], [(0, 1, 2)]),
        ([load(0, 80, 8, leaving=True), load(1, 40), load(2, 50)], [(0, 1, 5), (0, 2, 3)]),  # as far as there is room
        ([load(0, 80, 8, leaving=True), load(1, 75)], [(0, 1, 1)]),
        ([load(0, 30, leaving=True), load(1, 30, leaving=True)], []),
        ([load(0, 30, leaving=True)], []),
    ],
)
def test_repack_moves_requests_of_leaving_replicas(loads: list[KVLoad], expected: list[tuple[int, int, int]]) -> None:
    assert moves(*loads, only_leaving=True) == expected


def test_repack_with_only_leaving_skips_other_replicas() -> None:
    assert moves(load(0, 10), load(1, 20), only_leaving=True) == []


def test_is_idle_after_the_peak_of_kv() -> None:
    assert is_idle(load(0, 10), 0.9)
    assert not is_idle(load(0, 95, waiting=2, kv_before=96), 0.9)  # falling, but still above its limit
    assert is_idle(load(0, 85, waiting=2, kv_before=96), 0.9)


LOADS = st.lists(
    st.builds(
        dict,
        kv=st.integers(0, 100),
        requests=st.integers(0, 10),
        growth=st.integers(0, 50),
        waiting=st.sampled_from([0, 0, 0, 2]),
        kv_before=st.none() | st.integers(0, 100),
        leaving=st.sampled_from([False, False, False, True]),
    ),
    max_size=12,
)


@given(LOADS)
@settings(max_examples=300, deadline=None)
def test_repack_never_overfills_for_any_loads(drawn: list[dict]) -> None:
    loads = {i: load(i, fields.pop("kv"), fields.pop("requests"), **fields) for i, fields in enumerate(drawn)}
    plan = plan_repack(list(loads.values()), 0.9)
    sources, destinations = {m.source for m in plan}, {m.destination for m in plan}
    assert not sources & destinations
    given_away = Counter()
    for move in plan:
        given_away[move.source] += move.requests
        assert move.requests > 0
    for replica in sources:
        whole = loads[replica].requests
        assert given_away[replica] == whole or (loads[replica].leaving and given_away[replica] < whole)
    for replica in destinations:
        to, coming = loads[replica], [move for move in plan if move.destination == replica]
        grown = sum(
            (loads[m.source].kv_used + loads[m.source].growth) * m.requests / loads[m.source].requests for m in coming
        )
        assert to.kv_used + grown <= 90 + len(coming)  # a move may round off one token
        assert to.requests + sum(move.requests for move in coming) <= to.most_requests
        assert not to.leaving


# -- lengths ----------------------------------------------------------------------------------------------------------


def test_length_statistics_are_zero_before_any_finish() -> None:
    lengths = LengthStatistics()
    assert (lengths.kv(), lengths.remaining(10), lengths.growth(10, 5)) == (0.0, 0.0, 0.0)


def test_length_statistics_kv_is_that_at_a_random_step() -> None:
    lengths = LengthStatistics()
    for response in (10, 30):
        lengths.add(5, response)
    moments = [t for response in (10, 30) for t in range(response)]
    assert lengths.kv() == pytest.approx(5 + sum(moments) / len(moments), abs=0.6)


@pytest.mark.parametrize(("length", "expected"), [(0, 20), (10, 20), (29, 1), (30, 15), (100, 50)])
def test_length_statistics_remaining_is_the_mean_of_longer_ones(length: int, expected: float) -> None:
    lengths = LengthStatistics()
    for response in (10, 30, 20 if length == 0 else 30):
        lengths.add(5, response)
    assert lengths.remaining(5 + length) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kv", "requests", "expected"),
    [
        (5, 1, 20),  # a single one: the mean of the remaining tokens
        (5, 10, 10 * 12.5 + 20),  # half of them reach 35 tokens: 17.5 on average
        (15, 1, 20),
        (15, 10, 10 * 20),  # all remaining ones reach 35
        (35, 10, 10 * 15),  # longer than any observed: half as many again
    ],
)
def test_length_statistics_growth_is_the_expected_peak(kv: float, requests: int, expected: float) -> None:
    lengths = LengthStatistics()
    for response in (10, 30):
        lengths.add(5, response)
    assert lengths.growth(kv, requests) == pytest.approx(expected)


def test_length_statistics_drop_old_lengths() -> None:
    lengths = LengthStatistics()
    for _ in range(WINDOW):
        lengths.add(1, 1000)
    for _ in range(WINDOW):
        lengths.add(1, 2)
    assert lengths.kv() == pytest.approx(2)
