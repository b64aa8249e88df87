"""The table of trajectories under way: who owns each, since which lease, and what is still to be settled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class Owned:
    """Work and its owner. `emission` is the one that wrote the assignment, 0 if an earlier start did."""

    work: Work
    replica: int
    incarnation: int
    emission: int


class WorkTable:
    """Every trajectory that was dispatched and is not released: owned, lost by its owner, or finished and to be settled."""

    def __init__(self) -> None:
        self._owned: dict[str, Owned] = {}
        self._lost: dict[str, Owned] = {}
        self._finished: dict[str, Owned] = {}
        self._by_replica: dict[int, dict[Purpose, set[str]]] = {}
        self._training = 0

    def assign(self, owned: Owned) -> None:
        """Give a trajectory its owner; a former one loses it."""
        name, purpose = owned.work.trajectory_id, owned.work.prompt.purpose
        if self._take(name) is None:
            self._training += purpose == "train"
        self._owned[name] = owned
        loads = self._by_replica.setdefault(owned.replica, {"train": set(), "evaluation": set()})
        loads[purpose].add(name)

    def owner(self, name: str) -> Owned | None:
        """Who generates trajectory `name`, if anyone does."""
        return self._owned.get(name)

    def lose(self, name: str) -> None:
        """The owner is gone: the trajectory waits for its next one."""
        owned = self._take(name)
        if owned is not None:
            self._lost[name] = owned

    def lost(self, purpose: Purpose) -> list[Owned]:
        """What waits for its next owner."""
        return [owned for owned in self._lost.values() if owned.work.prompt.purpose == purpose]

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

    def names(self) -> list[str]:
        """Ids of all trajectories in the table."""
        return [*self._owned, *self._lost, *self._finished]

    def load(self, replica: int, purpose: Purpose | None = None) -> int:
        """Trajectories under way at `replica`."""
        loads = self._by_replica.get(replica, {})
        return sum(len(names) for kind, names in loads.items() if purpose in (None, kind))

    def training(self) -> int:
        """Training trajectories that are dispatched and not released."""
        return self._training

    def orphans(self, replica: int, alive: int | None) -> list[Owned]:
        """What other incarnations of `replica` than `alive` own, in order of dispatch."""
        names = [name for names in self._by_replica.get(replica, {}).values() for name in names]
        found = [self._owned[name] for name in names if self._owned[name].incarnation != alive]
        return sorted(found, key=lambda owned: owned.work.lease)

    def replicas(self) -> Iterator[int]:
        """Replicas that own work."""
        return (replica for replica in self._by_replica if self.load(replica))

    def oldest_emission(self) -> int | None:
        """The oldest emission with an assignment that is still needed after a restart."""
        entries = (*self._owned.values(), *self._lost.values(), *self._finished.values())
        return min((entry.emission for entry in entries), default=None)

    def _take(self, name: str) -> Owned | None:
        """Remove trajectory `name` from wherever it is."""
        owned = self._owned.pop(name, None)
        if owned is not None:
            self._by_replica[owned.replica][owned.work.prompt.purpose].discard(name)
            return owned
        return self._lost.pop(name, None) or self._finished.pop(name, None)


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
