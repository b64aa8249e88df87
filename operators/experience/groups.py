"""The groups that the buffer holds in memory: open (members missing), ready, and proposed. A group is one prompt's.

Ready groups are in the order of completion in the log: by the newest weight version announced when the last member
finished, then by offset, partition and row of that member's record. Offsets of different partitions cannot be compared,
so the version orders partitions. Neither a clock nor the order of polls matters, so a restart rebuilds the same order.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence

from operators.experience.members import GroupMember
from schemas.records import PolicyVersion


class Group:
    """Members of one prompt. `completed` orders groups; `expected` is how many samples the prompt has."""

    __slots__ = ("completed", "members", "number", "seen_at")

    def __init__(self, number: int, members: list[GroupMember], seen_at: float) -> None:
        self.number = number
        self.members = members
        self.seen_at = seen_at
        """When its first member arrived, in seconds of the `GroupClock`."""
        self.completed = (0, 0, 0, 0)

    @property
    def task(self) -> str:
        """The task of its prompt."""
        return self.members[0].task

    @property
    def expected(self) -> int:
        """How many samples its prompt has."""
        return self.members[0].size

    @property
    def tokens(self) -> int:
        """Tokens of all members, prompts included."""
        return sum(member.length for member in self.members)

    @property
    def rewards(self) -> list[float]:
        """The rewards of its members."""
        return [member.reward for member in self.members]

    def staleness(self, newest: PolicyVersion | None) -> int:
        """The staleness of its stalest member."""
        return max(member.staleness(newest) for member in self.members)

    def close(self, batch: int) -> None:
        """Set `completed`: no more members are awaited. `batch` is the number of the next batch, which bounds the
        version numbers that can exist."""
        last = max(self.members, key=lambda member: (member.block.offset, member.row))
        version = -1 if self.number < 0 else min(last.newest_number, batch)  # versions of other runs do not count
        self.completed = (version, last.block.offset, last.block.partition, last.row)


class Groups:
    """All groups in the buffer."""

    def __init__(self) -> None:
        self.open: dict[int, Group] = {}
        """By number, in the order in which their first members arrived."""
        self.ready: list[Group] = []
        """In the order of completion."""
        self.proposed: dict[int, Group] = {}
        """By number: proposed for a batch that several shards make. Evictions do not see them."""
        self.held = 0
        """Trajectories in groups of all three kinds."""
        self._ready_members = 0

    def __len__(self) -> int:
        return len(self.open) + len(self.ready) + len(self.proposed)

    def __iter__(self) -> Iterator[Group]:
        """Ready groups, then open ones."""
        yield from self.ready
        yield from self.open.values()

    def add(self, number: int, members: list[GroupMember], now: float) -> None:
        group = self.open.get(number)
        if group is None:
            self.open[number] = Group(number, members, now)
        else:
            group.members += members
        self.held += len(members)

    def complete(self, number: int, size: int, settled: int, batch: int) -> Group | None:
        """Close group `number` if its members, with `settled` members already settled, are all `size`; else None."""
        group = self.open.get(number)
        return self.close(number, batch) if group is not None and len(group.members) + settled >= size else None

    def close(self, number: int, batch: int) -> Group:
        """Remove open group `number` and close it. It is then neither open nor ready."""
        group = self.open.pop(number)
        self.held -= len(group.members)
        group.close(batch)
        return group

    def make_ready(self, group: Group) -> None:
        """Add a closed group to the ready ones."""
        bisect.insort(self.ready, group, key=lambda each: each.completed)
        self.held += len(group.members)
        self._ready_members += len(group.members)

    def take(self, wanted: int, order: Iterable[Group]) -> list[Group] | None:
        """Remove the first groups of `order` (ready groups) that have `wanted` members or more; None if too few."""
        if self._ready_members < wanted:
            return None
        taken, count = _first_groups(order, wanted)
        if count < wanted:
            return None
        self._remove_ready(taken, count)
        return taken

    @property
    def proposed_members(self) -> int:
        """How many members the proposed groups have."""
        return sum(len(group.members) for group in self.proposed.values())

    def propose(self, wanted: int, order: Iterable[Group]) -> list[Group]:
        """Move the first groups of `order` (ready groups), until they have `wanted` members, to the proposed ones."""
        taken, count = _first_groups(order, wanted)
        self._remove_ready(taken, count)
        for group in taken:
            self.add_proposed(group)
        return taken

    def add_proposed(self, group: Group) -> None:
        """Add a closed group to the proposed ones."""
        self.proposed[group.number] = group
        self.held += len(group.members)

    def take_proposed(self, numbers: Iterable[int]) -> list[Group]:
        """Remove the proposed groups among `numbers`."""
        taken = [self.proposed.pop(number) for number in numbers if number in self.proposed]
        self.held -= sum(len(group.members) for group in taken)
        return taken

    def remove(self, members: Sequence[GroupMember]) -> set[int]:
        """Remove `members` from open and ready groups; the numbers of the groups that are empty by that."""
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

    def _remove_ready(self, taken: list[Group], count: int) -> None:
        if all(first is group for first, group in zip(self.ready, taken, strict=False)):
            del self.ready[: len(taken)]
        else:
            gone = set(map(id, taken))
            self.ready = [group for group in self.ready if id(group) not in gone]
        self._ready_members -= count
        self.held -= count


def _first_groups(order: Iterable[Group], wanted: int) -> tuple[list[Group], int]:
    """The first groups of `order`, until they have `wanted` members or none is left; and how many members they have."""
    taken: list[Group] = []
    count = 0
    for group in order:
        taken.append(group)
        count += len(group.members)
        if count >= wanted:
            break
    return taken, count
