"""TrajectoryLedger: equal to a set in any order, at any group size and across restarts, and small."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from operators.io.ledger import TrajectoryLedger
from schemas.identity import Purpose, TrajectoryKey

TRAIN: Purpose = "train"


def key(number: int, member: int = 0, purpose: Purpose = TRAIN) -> TrajectoryKey:
    return TrajectoryKey(purpose, number, member)


def test_ledger_records_each_member_once() -> None:
    ledger = TrajectoryLedger(1)
    assert [ledger.add(key(3, m), 2, 1) for m in (1, 1, 0, 0, 1)] == [True, False, True, False, False]
    assert key(3, 0) in ledger
    assert key(3, 2) in ledger  # the group is closed
    assert key(2, 0) not in ledger


@pytest.mark.parametrize(
    ("closed", "partitions", "state"),
    [
        ([0, 1, 2], 1, {"p0": 3}),
        ([2, 1], 1, {"p0": 0}),
        ([2, 1, 0], 1, {"p0": 3}),
        ([0, 2, 4, 1], 2, {"p0": 3, "p1": 1}),
        ([5, 3], 2, {"p1": 0}),
        ([5, 3, 1], 2, {"p1": 3}),
    ],
)
def test_ledger_marks_rise_over_dense_closed_groups(closed: list[int], partitions: int, state: dict[str, int]) -> None:
    ledger = TrajectoryLedger(partitions)
    for number in closed:
        ledger.close(TRAIN, number, 1)
    assert ledger.state() == state


def test_ledger_separates_purposes() -> None:
    ledger = TrajectoryLedger(1)
    ledger.close("evaluation", 0, 4)
    assert key(0) not in ledger
    assert key(0, 0, "evaluation") in ledger
    assert ledger.state() == {"e0": 1}


def test_ledger_oldest_emission_is_that_of_groups_above_the_mark() -> None:
    ledger = TrajectoryLedger(1)
    assert ledger.oldest_emission() is None
    ledger.add(key(0, 0), 2, 5)
    ledger.close(TRAIN, 2, 6)
    assert ledger.oldest_emission() == 5
    ledger.add(key(0, 1), 2, 7)
    assert ledger.oldest_emission() == 6  # group 2, since group 1 is open
    ledger.close(TRAIN, 1, 8)
    assert ledger.oldest_emission() is None


SIZES = {0: 1, 1: 2, 2: 3}


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[tuple[Purpose, int, int, bool]], set[int]]:
    """Partition count, additions (some repeated, some that close the whole group), and where restarts happen."""
    partitions = draw(st.integers(1, 3))
    groups = draw(st.integers(1, 9))
    members = [
        (purpose, number, member, draw(st.booleans()) and draw(st.booleans()))
        for purpose in ("train", "evaluation")
        for number in range(groups)
        for member in range(SIZES[number % 3])
    ]
    history = draw(st.permutations(members))
    history += draw(st.lists(st.sampled_from(members), max_size=8))
    history = history[: draw(st.integers(1, len(history)))]
    return partitions, history, draw(st.sets(st.integers(0, len(history)), max_size=4))


@given(histories())
@settings(max_examples=300, deadline=None)
def test_ledger_equals_a_set_across_restarts(
    history: tuple[int, list[tuple[Purpose, int, int, bool]], set[int]],
) -> None:
    partitions, additions, restarts = history
    ledger, reference = TrajectoryLedger(partitions), set[tuple[str, int, int]]()
    written: list[list[tuple[str, Purpose, int, int]]] = [[]]  # by emission: what a restart reads back
    for at, (purpose, number, member, closes) in enumerate(additions):
        if at in restarts:
            ledger, written = restarted(ledger, partitions, written)
        emission = len(written)
        size = SIZES[number % 3]
        expected = (purpose, number, member) not in reference
        if closes:
            ledger.close(purpose, number, emission)
            reference |= {(purpose, number, m) for m in range(size)}
            written.append([("close", purpose, number, 0)])
        else:
            assert ledger.add(TrajectoryKey(purpose, number, member), size, emission) == expected
            reference.add((purpose, number, member))
            written.append([("add", purpose, number, member)] if expected else [])
    for purpose in ("train", "evaluation"):
        for number in range(9):
            for member in range(SIZES[number % 3]):
                finished = TrajectoryKey(purpose, number, member) in ledger
                assert finished == ((purpose, number, member) in reference)


def restarted(
    ledger: TrajectoryLedger, partitions: int, written: list[list[tuple[str, Purpose, int, int]]]
) -> tuple[TrajectoryLedger, list[list[tuple[str, Purpose, int, int]]]]:
    """The ledger after a restart: the state from the commit note, the exceptions from the shard's own output."""
    oldest = ledger.oldest_emission()
    read_back = [entry for emission in written[oldest:] for entry in emission] if oldest is not None else []
    after = TrajectoryLedger(partitions, json.loads(json.dumps(ledger.state())))
    for what, purpose, number, member in read_back:
        if what == "close":
            after.close(purpose, number, 0)
        else:
            after.add(TrajectoryKey(purpose, number, member), SIZES[number % 3], 0)
    return after, [read_back]


def test_ledger_stays_small_over_many_groups() -> None:
    ledger = TrajectoryLedger(4)
    order = [n + 7 - 2 * (n % 8) for n in range(4000)]  # each block of eight in descending order
    for emission, number in enumerate(order, 1):
        ledger.add(key(number), 1, emission)
    assert ledger.state() == {f"p{residue}": 1000 for residue in range(4)}
    assert ledger.oldest_emission() is None
    assert not ledger._members
    assert not ledger._emission
