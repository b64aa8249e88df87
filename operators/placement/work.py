"""The table of trajectories under way: who owns each, since which lease, and what is still to be settled."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from schemas.identity import Purpose, trajectory_id
from schemas.records import Assignment, Prompt


@dataclass(frozen=True, slots=True)
class Work:
    """A trajectory to be generated: `attempt` starts so far, `lease` of the last owner (0 before the first)."""

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
        self._training = 0

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
        self._owned[name] = owned
        self._by_owner.setdefault(owned.owner, {"train": {}, "evaluation": {}})[purpose][name] = None
        self._emissions[owned.emission] = self._emissions.get(owned.emission, 0) + 1

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
            self._lost[owned.work.prompt.purpose][name] = owned

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
        owned = self._owned.pop(name, None)
        if owned is None:
            found = (names.pop(name, None) for names in (*self._lost.values(), self._finished))
            return next((entry for entry in found if entry is not None), None)
        loads = self._by_owner[owned.owner]
        del loads[owned.work.prompt.purpose][name]
        if not any(loads.values()):
            del self._by_owner[owned.owner]
        return owned

    def _forget(self, emission: int) -> None:
        self._emissions[emission] -= 1
        if not self._emissions[emission]:
            del self._emissions[emission]


def assignment(work: Work, replica: int, incarnation: int, now: int) -> Assignment:
    """The assignment that gives `work`, already under its new lease, to a replica."""
    return Assignment(
        prompt=work.prompt,
        member=work.member,
        lease=work.lease,
        attempt=work.attempt,
        replica=replica,
        incarnation=incarnation,
        policy_version=work.prompt.policy_version,
        partial=None,
        assigned_at=now,
    )


def under_lease(work: Work, lease: int) -> Work:
    """`work` for its next owner, which starts it afresh."""
    return replace(work, lease=lease, attempt=work.attempt + 1)
