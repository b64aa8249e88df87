"""The buffer's ledger of settled trajectories, and the Settled records of one emission.

A group is known by its number in the buffer; the numbers of imported groups are negative.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from operators.experience.buffer_layout import BufferLayout
from operators.experience.groups import Group
from operators.experience.members import RowRun
from operators.io.elements import Restored
from operators.io.ledger import TrajectoryLedger
from schemas.block import Block
from schemas.identity import Purpose, is_trajectory_id, parse_trajectory_id
from schemas.records import Outcome, Settled


class SettlementLedger:
    """Registers each trajectory of training once and settles it once, across restarts.

    It also keeps the groups that left the buffer before all their members had arrived: later members are late.
    """

    def __init__(self, ledger: TrajectoryLedger) -> None:
        self._ledger = ledger
        self._held: dict[int, set[int]] = {}
        """By group: members registered and not settled."""
        self._left: set[int] = set()
        self._failed: set[int] = set()
        """Groups with a failed member, until all their members are settled."""
        self._emissions = 0
        self._columns: dict[str, list[Any]] = defaultdict(list)

    @classmethod
    def restored(cls, restored: Restored, layout: BufferLayout) -> SettlementLedger:
        """The ledger at a start: from the last commit note and the Settled records of this shard's groups."""
        settlements = cls(TrajectoryLedger(layout.partitions, restored.state.get("settled")))
        settled = [received.record for received in restored.ledger if is_trajectory_id(received.record.trajectory_id)]
        for record in settled:
            key = parse_trajectory_id(record.trajectory_id)
            number = key.number if key.purpose == "train" else ~key.number
            if layout.owns(number) and key.purpose != "evaluation":  # which settles its own in the same topic
                if record.group_closed:
                    settlements._left.add(number)
                if record.outcome == "failed":
                    settlements._failed.add(number)
                settlements._ledger.add(key, record.group_size, 0)
        settlements._forget(settlements._left | settlements._failed)
        return settlements

    def begin_emission(self) -> None:
        """Begin the next emission."""
        self._emissions += 1

    def register(self, number: int, members: Iterable[int]) -> list[int]:
        """Register arrived members of group `number`; the positions of those that had not arrived before."""
        settled = self._ledger.finished_members(*_prompt(number))
        if settled is None:
            return []
        held = self._held.setdefault(number, set())
        fresh = []
        for position, member in enumerate(members):
            if member not in held and member not in settled:
                held.add(member)
                fresh.append(position)
        if not held:
            del self._held[number]
        return fresh

    def settled_members(self, number: int) -> int:
        """How many members of group `number` are settled; 0 once all are."""
        return self._ledger.finished_count(*_prompt(number))

    def is_closed(self, number: int) -> bool:
        """Whether group `number` is settled, or left the buffer before all its members had arrived."""
        return number in self._left or self._ledger.finished_members(*_prompt(number)) is None

    def has_left(self, number: int) -> bool:
        """Whether group `number` left the buffer before all its members had arrived."""
        return number in self._left

    def has_failed(self, number: int) -> bool:
        """Whether a member of group `number`, not all of whose members are settled, has failed."""
        return number in self._failed

    def mark_left(self, number: int) -> None:
        """Mark group `number` as left: it waits for no more members, and its Settled records will say so."""
        self._left.add(number)

    def settle(
        self,
        runs: Sequence[RowRun],
        outcome: Outcome,
        reason: str,
        batch: int | None,
        staleness: np.ndarray | None,
        left: Iterable[int] = (),
    ) -> None:
        """Settle the members in `runs`; `staleness` is aligned with them. Groups in `left`, and groups of batched
        members, leave the buffer."""
        leaving = set(left)
        self._left |= leaving
        settled = 0
        for run in runs:
            for number, part in run.by_group():
                count = part.last - part.first
                of_part = [None] * count if staleness is None else staleness[settled : settled + count].tolist()
                self._settle(number, part, of_part, (outcome, reason, batch, outcome == "batched" or number in leaving))
                settled += count

    def settled_records(self, now: int) -> Block | None:
        """The Settled records of this emission, with `settled_at` = `now`; None if there are none."""
        columns, self._columns = self._columns, defaultdict(list)
        count = len(columns["trajectory_id"])
        return Block.from_columns(Settled, {**columns, "settled_at": [now] * count}) if count else None

    def oldest_emission(self) -> int | None:
        """The oldest emission that a restart must read back."""
        return self._ledger.oldest_emission()

    def state(self) -> dict[str, int]:
        """The state that the commit note holds."""
        return self._ledger.state()

    def _settle(
        self, number: int, run: RowRun, staleness: list[int] | list[None], same: tuple[Outcome, str, int | None, bool]
    ) -> None:
        """Settle members of group `number`; `same` for all are outcome, reason, batch and whether the group leaves."""
        block, first, last = run
        members = block.members[first:last]
        if (held := self._held.get(number)) is not None:
            held.difference_update(members)
            if not held:
                del self._held[number]
        self._columns["trajectory_id"] += block.ids[first:last]
        self._columns["group_size"] += block.sizes[first:last]
        self._columns["tokens"] += block.tokens[first:last].tolist()
        self._columns["staleness"] += staleness
        outcome, *others = same
        if number < 0 and outcome == "batched":
            outcome = "imported"
        for name, value in zip(("outcome", "reason", "batch", "group_closed"), (outcome, *others), strict=True):
            self._columns[name] += [value] * len(members)
        if same[-1]:
            self._left.add(number)
        if outcome == "failed":
            self._failed.add(number)
        self._ledger.add_members(*_prompt(number), members, block.sizes[first], self._emissions)
        self._forget({number})

    def _forget(self, numbers: set[int]) -> None:
        """Forget the groups of `numbers` whose members are all settled."""
        settled = [number for number in numbers if not self.settled_members(number)]
        self._left.difference_update(settled)
        self._failed.difference_update(settled)


def _prompt(number: int) -> tuple[Purpose, int]:
    """Purpose and prompt number of group `number`."""
    return ("train", number) if number >= 0 else ("imported", ~number)


class PromptOrder:
    """Yields ready groups in the order of their numbers, up to the first number that is neither ready nor closed.

    The buffer waits for long answers, so that staleness is bounded. Proof: placement dispatches prompts in the order of
    their dense numbers, under the newest version only. When it starts a group, at most B (S + 1) - 1 trajectories are
    dispatched and not trained (B is `global_batch`, S `max_staleness`). If batches take groups in the same order, the
    batches between the newest version at a group's dispatch and the batch that trains the group consist of those
    trajectories only, at least B in each. So there are at most S such batches, and their number is its staleness.
    """

    def __init__(self, settlements: SettlementLedger) -> None:
        self._settlements = settlements
        self._due = 0
        """All groups before this number are closed."""

    def order(self, ready: Iterable[Group]) -> Iterator[Group]:
        """The groups of `ready` that are due, in the order of their numbers."""
        due = self._due = self._first_not_closed(self._due)
        for group in sorted(ready, key=lambda group: group.number):
            due = self._first_not_closed(due) if group.number > due else due
            if group.number != due:
                return
            yield group
            due += 1

    def _first_not_closed(self, number: int) -> int:
        while self._settlements.is_closed(number):
            number += 1
        return number
