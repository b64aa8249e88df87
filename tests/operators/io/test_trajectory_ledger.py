"""The ledger answers as a plain set would, in any order, at any group size, across restarts; and stays small."""

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


def test_each_member_is_entered_once() -> None:
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
def test_marks_rise_over_what_is_dense_within_a_partition(
    closed: list[int], partitions: int, state: dict[str, int]
) -> None:
    ledger = TrajectoryLedger(partitions)
    for number in closed:
        ledger.close(TRAIN, number, 1)
    assert ledger.state() == state


def test_purposes_are_apart() -> None:
    ledger = TrajectoryLedger(1)
    ledger.close("evaluation", 0, 4)
    assert key(0) not in ledger
    assert key(0, 0, "evaluation") in ledger
    assert ledger.state() == {"e0": 1}


def test_the_oldest_emission_is_of_what_the_marks_do_not_say() -> None:
    ledger = TrajectoryLedger(1)
    assert ledger.oldest_emission() is None
    ledger.add(key(0, 0), 2, 5)
    ledger.close(TRAIN, 2, 6)
    assert ledger.oldest_emission() == 5
    ledger.add(key(0, 1), 2, 7)
    assert ledger.oldest_emission() == 6  # group 2, for group 1 is open
    ledger.close(TRAIN, 1, 8)
    assert ledger.oldest_emission() is None


SIZES = {0: 1, 1: 2, 2: 3}


@st.composite
def stories(draw: st.DrawFn) -> tuple[int, list[tuple[Purpose, int, int, bool]], set[int]]:
    """Partition count, additions (some doubled, some of them closing the whole group), and where restarts happen."""
    partitions = draw(st.integers(1, 3))
    groups = draw(st.integers(1, 9))
    members = [
        (purpose, number, member, draw(st.booleans()) and draw(st.booleans()))
        for purpose in ("train", "evaluation")
        for number in range(groups)
        for member in range(SIZES[number % 3])
    ]
    story = draw(st.permutations(members))
    story += draw(st.lists(st.sampled_from(members), max_size=8))
    story = story[: draw(st.integers(1, len(story)))]
    return partitions, story, draw(st.sets(st.integers(0, len(story)), max_size=4))


@given(stories())
@settings(max_examples=300, deadline=None)
def test_it_answers_as_a_set_does(story: tuple[int, list[tuple[Purpose, int, int, bool]], set[int]]) -> None:
    partitions, additions, restarts = story
    ledger, plain = TrajectoryLedger(partitions), set[tuple[str, int, int]]()
    written: list[list[tuple[str, Purpose, int, int]]] = [[]]  # by emission: what a restart reads back
    for at, (purpose, number, member, closes) in enumerate(additions):
        if at in restarts:
            ledger, written = restarted(ledger, partitions, written)
        emission = len(written)
        size = SIZES[number % 3]
        expected = (purpose, number, member) not in plain
        if closes:
            ledger.close(purpose, number, emission)
            plain |= {(purpose, number, m) for m in range(size)}
            written.append([("close", purpose, number, 0)])
        else:
            assert ledger.add(TrajectoryKey(purpose, number, member), size, emission) == expected
            plain.add((purpose, number, member))
            written.append([("add", purpose, number, member)] if expected else [])
    for purpose in ("train", "evaluation"):
        for number in range(9):
            for member in range(SIZES[number % 3]):
                answered = TrajectoryKey(purpose, number, member) in ledger
                assert answered == ((purpose, number, member) in plain)


def restarted(
    ledger: TrajectoryLedger, partitions: int, written: list[list[tuple[str, Purpose, int, int]]]
) -> tuple[TrajectoryLedger, list[list[tuple[str, Purpose, int, int]]]]:
    """The ledger after a restart: saved state through the note, exceptions through the shard's own output."""
    oldest = ledger.oldest_emission()
    read_back = [entry for emission in written[oldest:] for entry in emission] if oldest is not None else []
    after = TrajectoryLedger(partitions, json.loads(json.dumps(ledger.state())))
    for what, purpose, number, member in read_back:
        if what == "close":
            after.close(purpose, number, 0)
        else:
            after.add(TrajectoryKey(purpose, number, member), SIZES[number % 3], 0)
    return after, [read_back]


def test_it_stays_small() -> None:
    ledger = TrajectoryLedger(4)
    order = [n + 7 - 2 * (n % 8) for n in range(4000)]  # each block of eight backwards
    for emission, number in enumerate(order, 1):
        ledger.add(key(number), 1, emission)
    assert ledger.state() == {f"p{residue}": 1000 for residue in range(4)}
    assert ledger.oldest_emission() is None
    assert not ledger._members
    assert not ledger._emission
