"""The low-water mark of a shard's inputs: the offset below which nothing is pending."""

from __future__ import annotations

from collections.abc import Mapping

from operators.io.elements import PartitionKey


class PendingOffsets:
    """Input offsets that a restart must read again, by partition.

    Offsets rise within a partition, so the oldest pending one is the first in insertion order.
    """

    def __init__(self) -> None:
        self._pending: dict[PartitionKey, dict[int, int]] = {}

    def add(self, place: PartitionKey, offset: int, count: int = 1) -> None:
        """Add `count` holds on `offset`, one for each row of the record."""
        offsets = self._pending.setdefault(place, {})
        offsets[offset] = offsets.get(offset, 0) + count

    def remove(self, place: PartitionKey, offset: int, count: int = 1) -> None:
        """Release `count` holds on `offset`. Raises KeyError if it has none."""
        offsets = self._pending[place]
        offsets[offset] -= count
        if not offsets[offset]:
            del offsets[offset]

    def low_water(self, positions: Mapping[PartitionKey, int]) -> dict[PartitionKey, int]:
        """By partition: the oldest pending offset, or the position if nothing is pending."""
        return {place: next(iter(self._pending.get(place, ())), position) for place, position in positions.items()}
