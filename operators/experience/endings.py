"""Which trajectories' stories have ended: the buffer's ledger, and the Settled records of one emission."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from operators.experience.members import Member
from operators.io.elements import Restored
from operators.io.ledger import TrajectoryLedger
from schemas.block import Block
from schemas.identity import TrajectoryKey, parse_trajectory_id, trajectory_id
from schemas.records import Fate, Settled

_Row = tuple[Member, Fate, str, int | None, int | None, bool]


class Endings:
    """Each trajectory is expected once and ended once, across restarts. It also knows the groups that have left with
    members still to come: these are late when they do."""

    def __init__(self, ledger: TrajectoryLedger) -> None:
        self._ledger = ledger
        self._held: set[TrajectoryKey] = set()
        self._left: set[int] = set()
        self._emissions = 0
        self._rows: list[_Row] = []

    @classmethod
    def restored(cls, restored: Restored, partitions: int) -> Endings:
        """As a start finds it: from the last commit's marks and the Settled records read back."""
        endings = cls(TrajectoryLedger(partitions, restored.marks.get("settled")))
        for received in restored.ledger:
            key = parse_trajectory_id(received.record.trajectory_id)
            if key.purpose == "train":  # evaluation settles its own, in the same topic
                if received.record.group_left:
                    endings._left.add(key.number)
                endings._ledger.add(key, received.record.group_size, 0)
        endings._forget(set(endings._left))
        return endings

    def begin(self) -> None:
        """The next emission begins."""
        self._emissions += 1

    def expect(self, key: TrajectoryKey) -> bool:
        """Take note of a trajectory that has come; False if it had come before."""
        if key in self._held or key in self._ledger:
            return False
        self._held.add(key)
        return True

    def answered(self, number: int) -> int:
        """How many members of training group `number`, which is not all ended, have ended."""
        return self._ledger.answered("train", number)

    def has_left(self, number: int) -> bool:
        """Whether group `number` left the buffer before all its members had come."""
        return number in self._left

    def leave(self, number: int) -> None:
        """Group `number` waits for nobody any more. The Settled records of its members will say so."""
        self._left.add(number)

    def end(
        self,
        members: Sequence[Member],
        fate: Fate,
        reason: str,
        batch: int | None,
        ages: Sequence[int] | None,
        left: Iterable[int] = (),
    ) -> None:
        """End the stories of `members`, of `ages` versions. Groups `left` leave with them, and so do batched ones."""
        self._left.update(left)
        gone = set(left) if fate != "batched" else None
        for index, member in enumerate(members):
            self._held.discard(member.key)
            group_left = gone is None or member.number in gone
            self._rows.append((member, fate, reason, batch, ages[index] if ages is not None else None, group_left))
            if group_left:
                self._left.add(member.number)
        for member in members:
            self._ledger.add(member.key, member.size, self._emissions)
        self._forget({member.number for member in members})

    def settled(self, now: int) -> Block | None:
        """The Settled records of this emission, written at `now`; None if there are none."""
        rows, self._rows = self._rows, []
        if not rows:
            return None
        members, fates, reasons, batches, ages, left = zip(*rows, strict=True)
        columns: dict[str, Any] = {
            "trajectory_id": [trajectory_id(m.purpose, m.number, m.member) for m in members],
            "group_size": [member.size for member in members],
            "fate": fates,
            "reason": reasons,
            "batch": batches,
            "staleness": ages,
            "tokens": [member.tokens for member in members],
            "settled_at": [now] * len(rows),
            "group_left": left,
        }
        return Block.from_columns(Settled, columns)

    def oldest_emission(self) -> int | None:
        """The oldest emission that a restart must read back."""
        return self._ledger.oldest_emission()

    def marks(self) -> dict[str, int]:
        """What a commit's note says of the ledger."""
        return self._ledger.marks()

    def _forget(self, numbers: set[int]) -> None:
        """Of groups that have left, those of which all members have ended need not be known any more."""
        self._left.difference_update([n for n in numbers if not self._ledger.answered("train", n)])
