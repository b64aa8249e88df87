"""Which trajectories' stories have ended: the buffer's ledger, and the Settled records of one emission.

Groups go by their numbers in the buffer, which are below 0 where they were imported.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from operators.experience.members import RowRun
from operators.io.elements import Restored
from operators.io.ledger import TrajectoryLedger
from schemas.block import Block
from schemas.identity import Purpose, is_trajectory_id, parse_trajectory_id
from schemas.records import Outcome, Settled
from schemas.topics import partition_of


class Endings:
    """Each trajectory of training is expected once and ended once, across restarts. It also knows the groups that have
    left with members still to come: these are late when they do."""

    def __init__(self, ledger: TrajectoryLedger) -> None:
        self._ledger = ledger
        self._held: dict[int, set[int]] = {}
        """Members expected and not ended, by group."""
        self._left: set[int] = set()
        self._emissions = 0
        self._columns: dict[str, list[Any]] = defaultdict(list)

    @classmethod
    def restored(cls, restored: Restored, partitions: int, shard: int = 0, shards: int = 1) -> Endings:
        """As a start of `shard` finds it: from the last commit's state and the Settled records read back, its own."""
        endings = cls(TrajectoryLedger(partitions, restored.state.get("settled")))
        settled = [received.record for received in restored.ledger if is_trajectory_id(received.record.trajectory_id)]
        for record in settled:
            key = parse_trajectory_id(record.trajectory_id)
            own = partition_of(key.number, partitions) % shards == shard
            if own and key.purpose != "evaluation":  # which settles its own, in the same topic
                if record.group_left:
                    endings._left.add(key.number if key.purpose == "train" else ~key.number)
                endings._ledger.add(key, record.group_size, 0)
        endings._forget(set(endings._left))
        return endings

    def begin(self) -> None:
        """The next emission begins."""
        self._emissions += 1

    def expect(self, number: int, members: Iterable[int]) -> list[int]:
        """Take note of members of group `number` that have come; the positions of those that had not come before."""
        ended = self._ledger.members(*_prompt(number))
        if ended is None:
            return []
        held = self._held.setdefault(number, set())
        fresh = []
        for position, member in enumerate(members):
            if member not in held and member not in ended:
                held.add(member)
                fresh.append(position)
        if not held:
            del self._held[number]
        return fresh

    def held(self) -> int:
        """How many trajectories have come and not ended."""
        return sum(map(len, self._held.values()))

    def answered(self, number: int) -> int:
        """How many members of group `number`, which is not all ended, have ended."""
        return self._ledger.answered(*_prompt(number))

    def is_over(self, number: int) -> bool:
        """Whether group `number` has ended, or nobody waits for what is to come of it."""
        return number in self._left or self._ledger.members(*_prompt(number)) is None

    def has_left(self, number: int) -> bool:
        """Whether group `number` left the buffer before all its members had come."""
        return number in self._left

    def leave(self, number: int) -> None:
        """Group `number` waits for nobody any more. The Settled records of its members will say so."""
        self._left.add(number)

    def end(
        self,
        runs: Sequence[RowRun],
        outcome: Outcome,
        reason: str,
        batch: int | None,
        ages: np.ndarray | None,
        left: Iterable[int] = (),
    ) -> None:
        """End the stories of the members in `runs`, of `ages` versions. Groups `left` leave with them, and so do
        batched ones."""
        gone = set(left)
        self._left |= gone
        ended = 0
        for run in runs:
            for number, share in run.by_group():
                count = share.last - share.first
                aged = [None] * count if ages is None else ages[ended : ended + count].tolist()
                self._end(number, share, aged, (outcome, reason, batch, outcome == "batched" or number in gone))
                ended += count

    def settled(self, now: int) -> Block | None:
        """The Settled records of this emission, written at `now`; None if there are none."""
        columns, self._columns = self._columns, defaultdict(list)
        count = len(columns["trajectory_id"])
        return Block.from_columns(Settled, {**columns, "settled_at": [now] * count}) if count else None

    def oldest_emission(self) -> int | None:
        """The oldest emission that a restart must read back."""
        return self._ledger.oldest_emission()

    def state(self) -> dict[str, int]:
        """What a commit's note says of the ledger."""
        return self._ledger.state()

    def _end(
        self, number: int, run: RowRun, ages: list[int] | list[None], same: tuple[Outcome, str, int | None, bool]
    ) -> None:
        """End members of group `number`; `same` for all are outcome, reason, batch and whether their group leaves."""
        shelf, first, last = run
        members = shelf.members[first:last]
        if (held := self._held.get(number)) is not None:
            held.difference_update(members)
            if not held:
                del self._held[number]
        self._columns["trajectory_id"] += shelf.ids[first:last]
        self._columns["group_size"] += shelf.sizes[first:last]
        self._columns["tokens"] += shelf.tokens[first:last].tolist()
        self._columns["staleness"] += ages
        outcome, *others = same
        if number < 0 and outcome == "batched":
            outcome = "imported"
        for name, value in zip(("outcome", "reason", "batch", "group_left"), (outcome, *others), strict=True):
            self._columns[name] += [value] * len(members)
        if same[-1]:
            self._left.add(number)
        self._ledger.add_members(*_prompt(number), members, shelf.sizes[first], self._emissions)
        self._forget({number})

    def _forget(self, numbers: set[int]) -> None:
        """Of groups that have left, those of which all members have ended need not be known any more."""
        self._left.difference_update([n for n in numbers if not self.answered(n)])


def _prompt(number: int) -> tuple[Purpose, int]:
    """Purpose and number of the prompt of group `number`."""
    return ("train", number) if number >= 0 else ("imported", ~number)
