"""The low-water mark is the oldest offset still held, by partition, or the position where none is."""

from __future__ import annotations

import pytest

from operators.io.elements import PartitionKey
from operators.io.pending import PendingOffsets

A, B = PartitionKey("prompts", 0), PartitionKey("prompts", 1)


@pytest.mark.parametrize(
    ("added", "removed", "low"),
    [
        ([], [], 9),
        ([3, 4, 7], [], 3),
        ([3, 4, 7], [4], 3),
        ([3, 4, 7], [3], 4),
        ([3, 4, 7], [7, 4, 3], 9),
        ([3, 3, 4], [3], 3),
        ([3, 3, 4], [3, 3], 4),
    ],
)
def test_the_oldest_hold_counts(added: list[int], removed: list[int], low: int) -> None:
    pending = PendingOffsets()
    for offset in added:
        pending.add(A, offset)
    for offset in removed:
        pending.remove(A, offset)
    assert pending.low_water({A: 9, B: 5}) == {A: low, B: 5}


def test_an_offset_is_held_for_each_of_its_rows() -> None:
    pending = PendingOffsets()
    pending.add(A, 3, count=2)
    pending.remove(A, 3)
    assert pending.low_water({A: 9}) == {A: 3}
    pending.remove(A, 3)
    assert pending.low_water({A: 9}) == {A: 9}
    with pytest.raises(KeyError):
        pending.remove(A, 3)
