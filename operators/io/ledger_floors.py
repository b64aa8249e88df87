"""From where a restart must read the ledger topics back: for each emission, offsets that its outputs cannot precede."""

from __future__ import annotations

from collections.abc import Mapping

Floors = Mapping[str, int]
"""Offsets by "topic:partition"."""


class LedgerFloors:
    """The floors of the emissions of one start that a restart may still need.

    `noted` is what the commit before this start said: the floor of everything read back, which counts as emission 0.
    `ends` are the ends of the ledger partitions as of this start; nothing of this start lies before them.
    """

    def __init__(self, noted: Floors, ends: Floors) -> None:
        self._known = dict(ends)
        self._floors: dict[int, Floors] = {0: dict(noted)}

    def emit(self, number: int) -> None:
        """Emission `number`, which has outputs, is about to be written."""
        self._floors[number] = self._known

    def written(self, first: Floors) -> None:
        """A transaction is committed; `first` are its lowest offsets, in whatever topics."""
        self._known = self._known | {place: first[place] for place in self._known.keys() & first.keys()}

    def offsets(self, oldest: int | None) -> Floors:
        """The offsets to note when the oldest emission still needed is `oldest` (None: none is).

        What is older is forgotten. An emission without outputs has nothing to read back: the next one's floor is noted.
        """
        for number in [n for n in self._floors if oldest is None or n < oldest]:
            del self._floors[number]
        return next(iter(self._floors.values()), self._known)
