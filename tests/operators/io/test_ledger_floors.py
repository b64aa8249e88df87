"""LedgerFloors: the offset to read back from is at or before every output needed, and not much earlier."""

from __future__ import annotations

import random

import pytest

from operators.io.commits import LedgerFloors


def test_floors_count_the_ledger_read_back_as_emission_0() -> None:
    floors = LedgerFloors({"t:0": 3}, {"t:0": 10})
    assert floors.offsets(0) == {"t:0": 3}
    assert floors.offsets(None) == {"t:0": 10}


def test_floor_of_an_emission_is_the_transaction_before_it() -> None:
    floors = LedgerFloors({}, {"t:0": 10, "t:1": 20})
    floors.emit(1)
    floors.written({"t:0": 12, "other:0": 99})
    floors.emit(2)
    floors.written({"t:0": 15})
    floors.emit(3)
    assert floors.offsets(1) == {"t:0": 10, "t:1": 20}
    assert floors.offsets(2) == {"t:0": 12, "t:1": 20}
    assert floors.offsets(3) == {"t:0": 15, "t:1": 20}


@pytest.mark.parametrize(("oldest", "offset"), [(1, 10), (2, 12), (4, 12), (5, 12), (6, 14), (None, 14)])
def test_floor_of_an_emission_without_outputs_is_the_next_one(oldest: int | None, offset: int) -> None:
    floors = LedgerFloors({}, {"t:0": 10})
    floors.emit(1)
    floors.written({"t:0": 12})
    floors.emit(5)
    floors.written({"t:0": 14})
    assert floors.offsets(oldest) == {"t:0": offset}


def test_floors_never_exceed_the_offset_of_a_needed_output() -> None:
    """Random transactions of several emissions each: the floor always covers the oldest emission needed."""
    rng = random.Random(7)
    for _ in range(200):
        floors, end, number = LedgerFloors({}, {"t:0": 5}), 5, 0
        at: dict[int, int] = {}
        for _ in range(rng.randrange(1, 8)):
            first = None
            for _ in range(rng.randrange(1, 4)):
                number += 1
                if rng.random() < 0.7:
                    floors.emit(number)
                    at[number], first = end, end if first is None else first
                    end += rng.randrange(1, 3)
            if first is not None:
                floors.written({"t:0": first})
                end += 1  # the commit's marker
            needed = {n: offset for n, offset in at.items() if rng.random() < 0.5}
            at = needed
            noted = floors.offsets(min(needed, default=None))["t:0"]
            assert all(noted <= offset for offset in needed.values())
