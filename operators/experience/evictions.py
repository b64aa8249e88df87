"""Evictions: which members the buffer drops, each with a Settled record. By name, or a user's `module:Class`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from infra.setting_types import CheckedSettings, NonNegativeInt, Positive, PositiveInt
from operators.experience.batch_context import BatchContext
from operators.experience.groups import Group
from operators.experience.members import GroupMember


class Drop(NamedTuple):
    """A member to drop, and the reason for its Settled record."""

    member: GroupMember
    reason: str


@dataclass(frozen=True)
class Eviction:
    """The base class; it drops nothing. The options of an eviction are its dataclass fields."""

    def evict(self, groups: Sequence[Group], context: BatchContext) -> Iterable[Drop]:
        """The members of `groups` to drop. `groups` are the ready ones in the order of completion, then the open."""
        return ()


@dataclass(frozen=True)
class Staleness(Eviction, CheckedSettings):
    """Drops members staler than `most` versions. It starves long answers; correction in the loss does not."""

    most: NonNegativeInt = 4

    def evict(self, groups: Sequence[Group], context: BatchContext) -> Iterable[Drop]:
        for group in groups:
            for member in group.members:
                if (age := member.staleness(context.newest)) > self.most:
                    yield Drop(member, f"staleness {age} > {self.most}")


@dataclass(frozen=True)
class Age(Eviction, CheckedSettings):
    """Drops groups whose first member arrived more than `seconds` ago, by the monotonic clock of the buffer's process,
    which stops while the run is paused. After a restart all members have just arrived."""

    seconds: Positive = 3600.0

    def evict(self, groups: Sequence[Group], context: BatchContext) -> Iterable[Drop]:
        for group in groups:
            if (age := context.now - group.seen_at) > self.seconds:
                yield from (Drop(member, f"age {age:.0f} s > {self.seconds:g} s") for member in group.members)


@dataclass(frozen=True)
class Capacity(Eviction, CheckedSettings):
    """Drops whole groups, the oldest first, until the shard holds at most `trajectories`."""

    trajectories: PositiveInt = 100_000

    def evict(self, groups: Sequence[Group], context: BatchContext) -> Iterable[Drop]:
        over = context.held - self.trajectories
        for group in groups:
            if over <= 0:
                return
            over -= len(group.members)
            yield from (Drop(member, f"more than {self.trajectories} are held") for member in group.members)


EVICTIONS: Mapping[str, type[Eviction]] = {"staleness": Staleness, "age": Age, "capacity": Capacity}
