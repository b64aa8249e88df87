"""Groups of samples of one prompt, on their way to completion and ready to leave: the memory of the buffer.

What is ready stands in the order of completion as the log tells it: by the newest weight version announced when the
last member finished, then by offset, partition and row of its record. Offsets of one partition say nothing of those of
another, so versions order partitions. Neither a clock nor the order of polls takes part: a restart rebuilds the order.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence

from operators.experience.members import GroupMember
from schemas.records import PolicyVersion


class Group:
    """Members of one prompt. `completed` orders groups; `expected` is how many members the prompt has."""

    __slots__ = ("completed", "members", "number", "seen_at")

    def __init__(self, number: int, members: list[GroupMember], seen_at: float) -> None:
        self.number = number
        self.members = members
        self.seen_at = seen_at
        """When its first member came, by this process's monotonic clock."""
        self.completed = (0, 0, 0, 0)

    @property
    def task(self) -> str:
        """The task that asked."""
        return self.members[0].task

    @property
    def expected(self) -> int:
        """How many samples its prompt has."""
        return self.members[0].size

    @property
    def tokens(self) -> int:
        """Of all members, prompts included."""
        return sum(member.length for member in self.members)

    @property
    def rewards(self) -> list[float]:
        """Of its members."""
        return [member.reward for member in self.members]

    def staleness(self, newest: PolicyVersion | None) -> int:
        """That of its stalest member."""
        return max(member.staleness(newest) for member in self.members)

    def close(self, batch: int) -> None:
        """No member is to come any more. `batch` is the number of the next batch: no version is known beyond it."""
        last = max(self.members, key=lambda member: (member.shelf.offset, member.row))
        version = -1 if self.number < 0 else min(last.newest_number, batch)  # other runs' versions order nothing here
        self.completed = (version, last.shelf.offset, last.shelf.partition, last.row)


class Groups:
    """All groups that the buffer holds."""

    def __init__(self) -> None:
        self.open: dict[int, Group] = {}
        """By number, in the order in which they began."""
        self.ready: list[Group] = []
        """In the order of their completion."""
        self.offered: dict[int, Group] = {}
        """By number: set aside for a batch that several shards make. No eviction sees them."""
        self.held = 0
        """Trajectories, in groups of all three kinds."""
        self._ready_members = 0

    def __len__(self) -> int:
        return len(self.open) + len(self.ready) + len(self.offered)

    def __iter__(self) -> Iterator[Group]:
        """What is ready, then what is open."""
        yield from self.ready
        yield from self.open.values()

    def add(self, number: int, members: list[GroupMember], now: float) -> None:
        """Put members to group `number`."""
        group = self.open.get(number)
        if group is None:
            self.open[number] = Group(number, members, now)
        else:
            group.members += members
        self.held += len(members)

    def complete(self, number: int, size: int, answered: int, batch: int) -> Group | None:
        """Group `number`, taken out, if what it holds and `answered` members that are settled are all `size`."""
        group = self.open.get(number)
        return self.close(number, batch) if group is not None and len(group.members) + answered >= size else None

    def close(self, number: int, batch: int) -> Group:
        """Open group `number`, taken out: it waits for nobody any more. It is neither open nor ready."""
        group = self.open.pop(number)
        self.held -= len(group.members)
        group.close(batch)
        return group

    def make_ready(self, group: Group) -> None:
        """Take in a group that is closed and may leave."""
        bisect.insort(self.ready, group, key=_completed)
        self.held += len(group.members)
        self._ready_members += len(group.members)

    def take(self, wanted: int, order: Iterable[Group]) -> list[Group] | None:
        """The first groups of `order`, which gives ready ones, with `wanted` members or more; None: too few."""
        if self._ready_members < wanted:
            return None
        taken, count = _first(order, wanted)
        if count < wanted:
            return None
        self._leave(taken, count)
        return taken

    @property
    def set_aside(self) -> int:
        """Members of groups that are offered."""
        return sum(len(group.members) for group in self.offered.values())

    def offer(self, wanted: int, order: Iterable[Group]) -> list[Group]:
        """Set aside the first groups of `order`, which gives ready ones, with `wanted` members or all; those groups."""
        taken, count = _first(order, wanted)
        self._leave(taken, count)
        for group in taken:
            self.keep(group)
        return taken

    def keep(self, group: Group) -> None:
        """Take in a group that is closed and has been offered."""
        self.offered[group.number] = group
        self.held += len(group.members)

    def call(self, numbers: Iterable[int]) -> list[Group]:
        """Those of `numbers` that are offered, taken out."""
        called = [self.offered.pop(number) for number in numbers if number in self.offered]
        self.held -= sum(len(group.members) for group in called)
        return called

    def take_back(self, numbers: Iterable[int]) -> None:
        """Those of `numbers` that are offered are ready as if they had not been."""
        for group in self.call(numbers):
            self.make_ready(group)

    def remove(self, members: Sequence[GroupMember]) -> set[int]:
        """Take `members` out, wherever they are; the numbers of the groups that have none left by that."""
        gone = set(map(id, members))
        touched = {member.number for member in members}
        emptied: set[int] = set()
        for group in [group for group in self if group.number in touched]:
            before = len(group.members)
            group.members = [member for member in group.members if id(member) not in gone]
            lost = before - len(group.members)
            self.held -= lost
            if group.number not in self.open:
                self._ready_members -= lost
            if not group.members:
                emptied.add(group.number)
                self.open.pop(group.number, None)
        self.ready = [group for group in self.ready if group.members]
        return emptied

    def _leave(self, taken: list[Group], count: int) -> None:
        if all(mine is theirs for mine, theirs in zip(self.ready, taken, strict=False)):
            del self.ready[: len(taken)]
        else:
            gone = set(map(id, taken))
            self.ready = [group for group in self.ready if id(group) not in gone]
        self._ready_members -= count
        self.held -= count


def _completed(group: Group) -> tuple[int, int, int, int]:
    return group.completed


def _first(order: Iterable[Group], wanted: int) -> tuple[list[Group], int]:
    """The first groups of `order`, until they have `wanted` members or there are no more; and how many they have."""
    taken: list[Group] = []
    count = 0
    for group in order:
        taken.append(group)
        count += len(group.members)
        if count >= wanted:
            break
    return taken, count
