"""The ledger of finished trajectories (invariant 2): exact over a whole run, small at any length.

Prompt numbers are dense within a partition, so the groups that are closed are a low mark plus a few exceptions. The
mark travels in the note of every commit; the exceptions are read back from the shard's own output after a restart.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from schemas.identity import LETTERS, PURPOSES, Purpose, TrajectoryKey
from schemas.topics import partition_of

_NOBODY: AbstractSet[int] = frozenset()


class TrajectoryLedger:
    """Which members of which groups have been answered.

    `partitions` is the partition count of the topics keyed by group. Emission numbers never fall from call to call.
    """

    def __init__(self, partitions: int, state: Mapping[str, Any] | None = None) -> None:
        self._partitions = partitions
        self._marks: dict[tuple[Purpose, int], int] = {}
        self._members: dict[tuple[Purpose, int], set[int] | None] = {}  # None: closed
        # In the order of their numbers; a plain dict would step over all that has left to find the first.
        self._emission: OrderedDict[tuple[Purpose, int], int] = OrderedDict()
        for name, mark in (state or {}).items():
            self._marks[PURPOSES[name[0]], int(name[1:])] = mark

    def __contains__(self, key: TrajectoryKey) -> bool:
        members = self.members(key.purpose, key.number)
        return members is None or key.member in members

    def members(self, purpose: Purpose, number: int) -> AbstractSet[int] | None:
        """Which members of a group have been answered; None: all have."""
        return None if self._below_mark(purpose, number) else self._members.get((purpose, number), _NOBODY)

    def answered(self, purpose: Purpose, number: int) -> int:
        """How many members of a group that is not closed have been answered."""
        return len(self._members.get((purpose, number)) or ())

    def add(self, key: TrajectoryKey, size: int, emission: int) -> bool:
        """Enter a trajectory of a group of `size`, answered in emission number `emission`; False if it was there."""
        return bool(self.add_members(key.purpose, key.number, (key.member,), size, emission))

    def add_members(
        self, purpose: Purpose, number: int, members: Sequence[int], size: int, emission: int
    ) -> Sequence[int]:
        """Enter members of a group of `size`, as `add` does each; those that were not there."""
        group = (purpose, number)
        known = None if self._below_mark(purpose, number) else self._members.setdefault(group, set())
        if known is None:
            return ()
        fresh = [member for member in dict.fromkeys(members) if member not in known]
        known.update(fresh)
        self._emission.setdefault(group, emission)
        if len(known) >= size:
            self.close(purpose, number, emission)
        return fresh

    def close(self, purpose: Purpose, number: int, emission: int) -> None:
        """Close a whole group: every member counts as answered."""
        if self._below_mark(purpose, number):
            return
        self._members[purpose, number] = None
        self._emission.setdefault((purpose, number), emission)
        residue = partition_of(number, self._partitions)
        mark = self._marks.get((purpose, residue), 0)
        while self._members.get(group := (purpose, mark * self._partitions + residue), ()) is None:
            del self._members[group]
            del self._emission[group]
            mark += 1
        self._marks[purpose, residue] = mark

    def oldest_emission(self) -> int | None:
        """The number of the oldest emission that a restart must read back; None if the marks say it all."""
        return next(iter(self._emission.values()), None)

    def state(self) -> dict[str, int]:
        """The marks for a commit's note."""
        return {f"{LETTERS[purpose]}{residue}": mark for (purpose, residue), mark in self._marks.items()}

    def _below_mark(self, purpose: Purpose, number: int) -> bool:
        mark = self._marks.get((purpose, partition_of(number, self._partitions)), 0)
        return number // self._partitions < mark
