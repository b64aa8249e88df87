"""The table of trajectories under way: who owns each, since which lease, and what is still to be settled."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from operators.placement.pool import PooledPartial
from schemas.identity import Purpose, trajectory_id
from schemas.records import Assignment, PolicyVersion, Prompt


@dataclass(frozen=True, slots=True)
class Work:
    """A trajectory to be generated: `lease` of its last owner (0 before the first), `attempt` with the last start."""

    prompt: Prompt
    member: int
    lease: int = 0
    attempt: int = 0

    @property
    def trajectory_id(self) -> str:
        return trajectory_id(self.prompt.purpose, self.prompt.number, self.member)


class Owner(NamedTuple):
    """One life of one replica."""

    replica: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Owned:
    """Work and its owner. `emission` is the one that wrote the assignment, 0 if an earlier start did."""

    work: Work
    replica: int
    incarnation: int
    emission: int

    @property
    def owner(self) -> Owner:
        return Owner(self.replica, self.incarnation)


@dataclass(frozen=True, slots=True)
class HandOver:
    """A trajectory's way to its next owner, under way since its owner was told to release it."""

    lease: int
    to: Owner


class WorkTable:
    """Every trajectory dispatched and not released: owned, lost by its owner, or finished and to be settled.

    Emission numbers never fall from one `assign` to the next.
    """

    def __init__(self) -> None:
        self._owned: dict[str, Owned] = {}
        self._lost: dict[Purpose, dict[str, Owned]] = {"train": {}, "evaluation": {}}
        self._finished: dict[str, Owned] = {}
        self._by_owner: dict[Owner, dict[Purpose, dict[str, None]]] = {}
        self._emissions: OrderedDict[int, int] = OrderedDict()  # how many entries need each emission
        self._leaving: dict[str, HandOver] = {}
        self._expected: Counter[Owner] = Counter()
        self._training = 0
        self._under_way = 0

    def __contains__(self, name: str) -> bool:
        return name in self._owned or name in self._finished or any(name in lost for lost in self._lost.values())

    def assign(self, owned: Owned) -> None:
        """Give a trajectory its owner; a former one loses it."""
        name, purpose = owned.work.trajectory_id, owned.work.prompt.purpose
        before = self._take(name)
        if before is None:
            self._training += purpose == "train"
        else:
            self._forget(before.emission)
        self._put(name, owned)
        self._emissions[owned.emission] = self._emissions.get(owned.emission, 0) + 1

    def release_to(self, name: str, hand_over: HandOver) -> None:
        """The owner of trajectory `name` is told to give it away; it has it until `hand_over` says otherwise."""
        self.stay(name)
        self._leaving[name] = hand_over
        self._expected[hand_over.to] += 1

    def hand_over(self, name: str, lease: int, to: Owner) -> None:
        """Trajectory `name`, which had not finished, has been given to its next owner."""
        owned = self._take(name)
        assert owned is not None
        self._put(name, Owned(replace(owned.work, lease=lease), to.replica, to.incarnation, owned.emission))

    def stay(self, name: str) -> None:
        """Trajectory `name` is on its way no more."""
        hand_over = self._leaving.pop(name, None)
        if hand_over is not None:
            self._expected[hand_over.to] -= 1
            if not self._expected[hand_over.to]:
                del self._expected[hand_over.to]

    def leaving(self, name: str) -> HandOver | None:
        """Where trajectory `name` is on its way to."""
        return self._leaving.get(name)

    def all_leaving(self) -> dict[tuple[Owner, Owner], list[str]]:
        """Trajectories that are on their way, by whence and whither."""
        found: dict[tuple[Owner, Owner], list[str]] = {}
        for name, hand_over in self._leaving.items():
            found.setdefault((self._owned[name].owner, hand_over.to), []).append(name)
        return found

    def expected(self, owner: Owner) -> int:
        """Trajectories on their way to `owner`."""
        return self._expected[owner]

    def at(self, owner: Owner) -> list[Owned]:
        """What `owner` has, in order of its coming."""
        return [self._owned[name] for names in self._by_owner.get(owner, {}).values() for name in names]

    def under_way(self) -> int:
        """Training trajectories that have not finished."""
        return self._under_way

    def _put(self, name: str, owned: Owned) -> None:
        purpose = owned.work.prompt.purpose
        self._owned[name] = owned
        self._under_way += purpose == "train"
        self._by_owner.setdefault(owned.owner, {"train": {}, "evaluation": {}})[purpose][name] = None

    def owner(self, name: str) -> Owned | None:
        """Who generates trajectory `name`, if anyone does."""
        return self._owned.get(name)

    def unfinished(self, name: str) -> Owned | None:
        """Trajectory `name` if somebody generates it, or has lost it."""
        return self._owned.get(name) or next((lost[name] for lost in self._lost.values() if name in lost), None)

    def lose(self, name: str) -> None:
        """The owner is gone: the trajectory waits for its next one."""
        owned = self._take(name)
        if owned is not None:
            purpose = owned.work.prompt.purpose
            self._lost[purpose][name] = owned
            self._under_way += purpose == "train"

    def lost(self, purpose: Purpose) -> list[Owned]:
        """What waits for its next owner."""
        return list(self._lost[purpose].values())

    def finish(self, name: str) -> Owned | None:
        """The trajectory has finished: it stays outstanding until it is released. Returns who owned it."""
        owner = self._owned.get(name)
        entry = self._take(name)
        if entry is not None:
            self._finished[name] = entry
        return owner

    def release(self, name: str) -> None:
        """The trajectory is settled for good."""
        entry = self._take(name)
        if entry is not None:
            self._training -= entry.work.prompt.purpose == "train"
            self._forget(entry.emission)

    def names(self) -> list[str]:
        """Ids of all trajectories in the table."""
        return [*self._owned, *self._lost["train"], *self._lost["evaluation"], *self._finished]

    def load(self, owner: Owner, purpose: Purpose | None = None) -> int:
        """Trajectories under way at `owner`."""
        loads = self._by_owner.get(owner, {})
        return sum(len(names) for kind, names in loads.items() if purpose in (None, kind))

    def training(self) -> int:
        """Training trajectories that are dispatched and not released."""
        return self._training

    def owners(self) -> list[Owner]:
        """Whoever owns work."""
        return list(self._by_owner)

    def orphans(self, is_gone: Callable[[Owner], bool]) -> list[Owned]:
        """What owners have that are gone, in order of dispatch."""
        gone = [loads for owner, loads in self._by_owner.items() if is_gone(owner)]
        names = [name for loads in gone for names in loads.values() for name in names]
        return sorted((self._owned[name] for name in names), key=lambda owned: owned.work.lease)

    def oldest_emission(self) -> int | None:
        """The oldest emission with an assignment that is still needed after a restart."""
        return next(iter(self._emissions), None)

    def _take(self, name: str) -> Owned | None:
        """Remove trajectory `name` from wherever it is."""
        self.stay(name)
        owned = self._owned.pop(name, None)
        if owned is None:
            for purpose, names in self._lost.items():
                if name in names:
                    self._under_way -= purpose == "train"
                    return names.pop(name)
            return self._finished.pop(name, None)
        self._under_way -= owned.work.prompt.purpose == "train"
        loads = self._by_owner[owned.owner]
        del loads[owned.work.prompt.purpose][name]
        if not any(loads.values()):
            del self._by_owner[owned.owner]
        return owned

    def _forget(self, emission: int) -> None:
        self._emissions[emission] -= 1
        if not self._emissions[emission]:
            del self._emissions[emission]


def assignment(owned: Owned, partial: PooledPartial | None, version: PolicyVersion | None, now: int) -> Assignment:
    """The assignment that gives work, already under its new lease, to its owner, who resumes it from `partial`."""
    work = owned.work
    return Assignment(
        prompt=work.prompt,
        member=work.member,
        lease=work.lease,
        attempt=work.attempt,
        replica=owned.replica,
        incarnation=owned.incarnation,
        policy_version=work.prompt.policy_version or version,
        partial=None if partial is None else partial.response,
        assigned_at=now,
        version_spans=() if partial is None else partial.version_spans,
    )


def under_lease(work: Work, lease: int, gained: bool) -> Work:
    """`work` for its next owner; a start that has `gained` nothing was an attempt."""
    return replace(work, lease=lease, attempt=work.attempt + (not gained))
