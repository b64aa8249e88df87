"""The ledger of finished trajectories (invariant 2): exact over a whole run, and small however long the run is.

Prompt numbers are dense within a partition, so the closed groups are a low-water mark plus a few exceptions. The mark
is saved in every commit note; after a restart the exceptions are read back from the shard's own output.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from schemas.identity import LETTERS, PURPOSES, Purpose, TrajectoryKey
from schemas.topics import partition_of

_NO_MEMBERS: AbstractSet[int] = frozenset()


class TrajectoryLedger:
    """Which members of which groups have finished.

    `partitions` is the partition count of the topics keyed by group; `state` is that of the last commit. Emission
    numbers never decrease from call to call.
    """

    def __init__(self, partitions: int, state: Mapping[str, Any] | None = None) -> None:
        self._partitions = partitions
        self._closed_below: dict[tuple[Purpose, int], int] = {}  # by purpose and partition, in groups of the partition
        self._members: dict[tuple[Purpose, int], set[int] | None] = {}  # None: closed
        # By emission number, rising. In a plain dict, finding the first entry would scan all deleted ones.
        self._emission: OrderedDict[tuple[Purpose, int], int] = OrderedDict()
        for name, closed_below in (state or {}).items():
            self._closed_below[PURPOSES[name[0]], int(name[1:])] = closed_below

    def __contains__(self, key: TrajectoryKey) -> bool:
        members = self.finished_members(key.purpose, key.number)
        return members is None or key.member in members

    def finished_members(self, purpose: Purpose, number: int) -> AbstractSet[int] | None:
        """The members of a group that have finished; None: all have."""
        return None if self._is_closed(purpose, number) else self._members.get((purpose, number), _NO_MEMBERS)

    def finished_count(self, purpose: Purpose, number: int) -> int:
        """How many members of a group that is not closed have finished."""
        return len(self._members.get((purpose, number)) or ())

    def add(self, key: TrajectoryKey, size: int, emission: int) -> bool:
        """Record a trajectory of a group of `size`, finished in `emission`; False if it was recorded before."""
        return bool(self.add_members(key.purpose, key.number, (key.member,), size, emission))

    def add_members(
        self, purpose: Purpose, number: int, members: Sequence[int], size: int, emission: int
    ) -> Sequence[int]:
        """Record members of a group of `size`, as `add` does; return those that were not recorded before."""
        group = (purpose, number)
        known = None if self._is_closed(purpose, number) else self._members.setdefault(group, set())
        if known is None:
            return ()
        fresh = [member for member in dict.fromkeys(members) if member not in known]
        known.update(fresh)
        self._emission.setdefault(group, emission)
        if len(known) >= size:
            self.close(purpose, number, emission)
        return fresh

    def close(self, purpose: Purpose, number: int, emission: int) -> None:
        """Close a whole group: every member counts as finished."""
        if self._is_closed(purpose, number):
            return
        self._members[purpose, number] = None
        self._emission.setdefault((purpose, number), emission)
        residue = partition_of(number, self._partitions)
        closed_below = self._closed_below.get((purpose, residue), 0)
        while self._members.get(group := (purpose, closed_below * self._partitions + residue), ()) is None:
            del self._members[group]
            del self._emission[group]
            closed_below += 1
        self._closed_below[purpose, residue] = closed_below

    def oldest_emission(self) -> int | None:
        """The number of the oldest emission that a restart must read back; None if `state` is sufficient."""
        return next(iter(self._emission.values()), None)

    def state(self) -> dict[str, int]:
        """The low-water marks, for the commit note."""
        return {f"{LETTERS[purpose]}{residue}": below for (purpose, residue), below in self._closed_below.items()}

    def _is_closed(self, purpose: Purpose, number: int) -> bool:
        """Whether a group is below its partition's low-water mark."""
        closed_below = self._closed_below.get((purpose, partition_of(number, self._partitions)), 0)
        return number // self._partitions < closed_below
