"""Where a restart starts to read the ledger topics: for each emission, a lower bound of the offsets of its outputs."""

from __future__ import annotations

from collections.abc import Mapping

Floors = Mapping[str, int]
"""Offsets by "topic:partition"."""


class LedgerFloors:
    """The floors of those emissions of one start that a restart may still need.

    `noted` is from the last commit note before this start: the floor of the ledger that was read back, which counts as
    emission 0. `ends` are the end offsets of the ledger partitions at this start; its own outputs come after them.
    """

    def __init__(self, noted: Floors, ends: Floors) -> None:
        self._known = dict(ends)
        self._floors: dict[int, Floors] = {0: dict(noted)}

    def emit(self, number: int) -> None:
        """Record that emission `number`, which has outputs, is about to be written."""
        self._floors[number] = self._known

    def written(self, first: Floors) -> None:
        """Record a committed transaction; `first` are its lowest offsets in any topics."""
        self._known = self._known | {place: first[place] for place in self._known.keys() & first.keys()}

    def offsets(self, oldest: int | None) -> Floors:
        """The floors for the commit note when the oldest emission still needed is `oldest` (None: none is).

        Older floors are dropped. An emission without outputs has no floor: that of the next one is returned.
        """
        for number in [n for n in self._floors if oldest is None or n < oldest]:
            del self._floors[number]
        return next(iter(self._floors.values()), self._known)
