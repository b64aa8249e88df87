"""PendingOffsets: the low-water mark of a partition is its oldest pending offset, or the position if none is."""

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
def test_low_water_is_the_oldest_pending_offset(added: list[int], removed: list[int], low: int) -> None:
    pending = PendingOffsets()
    for offset in added:
        pending.add(A, offset)
    for offset in removed:
        pending.remove(A, offset)
    assert pending.low_water({A: 9, B: 5}) == {A: low, B: 5}


def test_pending_offset_counts_each_of_its_rows() -> None:
    pending = PendingOffsets()
    pending.add(A, 3, count=2)
    pending.remove(A, 3)
    assert pending.low_water({A: 9}) == {A: 3}
    pending.remove(A, 3)
    assert pending.low_water({A: 9}) == {A: 9}
    with pytest.raises(KeyError):
        pending.remove(A, 3)
