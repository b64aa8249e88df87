"""What is dropped, and why: evictions, found by name, or `module:Class` of the user's. Each is a Settled record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from operators.experience.batch_context import BatchContext
from operators.experience.groups import Group
from operators.experience.members import GroupMember


class Drop(NamedTuple):
    """A member that is dropped, and the reason that its Settled record gives."""

    member: GroupMember
    reason: str


@dataclass(frozen=True)
class Eviction:
    """Drops nothing. Others derive from it; options are fields."""

    def evict(self, groups: Sequence[Group], moment: BatchContext) -> Iterable[Drop]:
        """What to drop of `groups`: those ready in the order of their completion, then those still open."""
        return ()


@dataclass(frozen=True)
class Staleness(Eviction):
    """Drops members over `most` versions old. It starves long answers; correction in the loss does not."""

    most: int = 4

    def __post_init__(self) -> None:
        if self.most < 0:
            raise ValueError(f"most must not be negative, not {self.most}")

    def evict(self, groups: Sequence[Group], moment: BatchContext) -> Iterable[Drop]:
        for group in groups:
            for member in group.members:
                if (age := member.staleness(moment.newest)) > self.most:
                    yield Drop(member, f"staleness {age} > {self.most}")


@dataclass(frozen=True)
class Age(Eviction):
    """Drops groups of which the first member came more than `seconds` ago, by the clock of the buffer's own process.
    What a restart reads again has just come."""

    seconds: float = 3600.0

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"seconds must be positive, not {self.seconds}")

    def evict(self, groups: Sequence[Group], moment: BatchContext) -> Iterable[Drop]:
        for group in groups:
            if (age := moment.now - group.seen_at) > self.seconds:
                yield from (Drop(member, f"age {age:.0f} s > {self.seconds:g} s") for member in group.members)


@dataclass(frozen=True)
class Capacity(Eviction):
    """Drops whole groups, those first that completed first, until at most `trajectories` are held, by each shard."""

    trajectories: int = 100_000

    def __post_init__(self) -> None:
        if self.trajectories < 1:
            raise ValueError(f"trajectories must be at least 1, not {self.trajectories}")

    def evict(self, groups: Sequence[Group], moment: BatchContext) -> Iterable[Drop]:
        over = moment.held - self.trajectories
        for group in groups:
            if over <= 0:
                return
            over -= len(group.members)
            yield from (Drop(member, f"more than {self.trajectories} are held") for member in group.members)


EVICTIONS: Mapping[str, type[Eviction]] = {"staleness": Staleness, "age": Age, "capacity": Capacity}
