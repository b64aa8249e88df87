"""The table of dispatched trajectories: the owner and lease of each, until it is settled."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from schemas.columns import flags, floats, token_ids
from schemas.identity import Purpose, trajectory_id
from schemas.records import PolicyVersion, Prompt, Response, Trajectory


@dataclass(frozen=True, slots=True)
class Work:
    """A trajectory to generate. `lease` is that of its last owner (0: none yet), `attempt` that of its last start."""

    prompt: Prompt
    member: int
    lease: int = 0
    attempt: int = 0

    @property
    def trajectory_id(self) -> str:
        return trajectory_id(self.prompt.purpose, self.prompt.number, self.member)


class Owner(NamedTuple):
    """One incarnation of one replica."""

    replica: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Owned:
    """Work and its owner. `emission` wrote the assignment; it is 0 if an earlier start did."""

    work: Work
    replica: int
    incarnation: int
    emission: int

    @property
    def owner(self) -> Owner:
        return Owner(self.replica, self.incarnation)


@dataclass(frozen=True, slots=True)
class HandOver:
    """The move of a trajectory to its next owner, from the Release on."""

    lease: int
    to: Owner


class WorkTable:
    """Every trajectory that is dispatched and not released: owned, lost by its owner, or finished and not settled.

    Emission numbers never decrease from one `assign` to the next.
    """

    def __init__(self) -> None:
        self._owned: dict[str, Owned] = {}
        self._lost: dict[Purpose, dict[str, Owned]] = {"train": {}, "evaluation": {}}
        self._finished: dict[str, Owned] = {}
        self._by_owner: dict[Owner, dict[Purpose, dict[str, None]]] = {}
        self._emission_uses: OrderedDict[int, int] = OrderedDict()  # number of entries that need each emission
        self._hand_overs: dict[str, HandOver] = {}
        self._incoming: Counter[Owner] = Counter()
        self.outstanding_training = 0
        """How many training trajectories are dispatched and not released."""
        self.unfinished_training = 0
        """How many training trajectories have not finished."""

    def __contains__(self, name: str) -> bool:
        return name in self._owned or name in self._finished or any(name in lost for lost in self._lost.values())

    def assign(self, owned: Owned) -> None:
        """Record the owner of a trajectory; it replaces a previous one."""
        name, purpose = owned.work.trajectory_id, owned.work.prompt.purpose
        before = self._take(name)
        if before is None:
            self.outstanding_training += purpose == "train"
        else:
            self._release_emission(before.emission)
        self._put(name, owned)
        self._emission_uses[owned.emission] = self._emission_uses.get(owned.emission, 0) + 1

    def start_hand_over(self, name: str, hand_over: HandOver) -> None:
        """Record that the owner of `name` must release it; it remains the owner until `complete_hand_over`."""
        self.cancel_hand_over(name)
        self._hand_overs[name] = hand_over
        self._incoming[hand_over.to] += 1

    def complete_hand_over(self, name: str, lease: int, to: Owner) -> None:
        """Record the next owner of `name`, which has not finished."""
        owned = self._take(name)
        assert owned is not None
        self._put(name, Owned(replace(owned.work, lease=lease), to.replica, to.incarnation, owned.emission))

    def cancel_hand_over(self, name: str) -> None:
        """End the hand-over of `name`, if there is one; its owner stays the same."""
        hand_over = self._hand_overs.pop(name, None)
        if hand_over is not None:
            self._incoming[hand_over.to] -= 1
            if not self._incoming[hand_over.to]:
                del self._incoming[hand_over.to]

    def hand_over_of(self, name: str) -> HandOver | None:
        """The hand-over of `name`, if it is moving."""
        return self._hand_overs.get(name)

    def hand_overs(self) -> dict[tuple[Owner, Owner], list[str]]:
        """Moving trajectories, by source and destination."""
        found: dict[tuple[Owner, Owner], list[str]] = {}
        for name, hand_over in self._hand_overs.items():
            found.setdefault((self._owned[name].owner, hand_over.to), []).append(name)
        return found

    def incoming(self, owner: Owner) -> int:
        """How many trajectories are moving to `owner`."""
        return self._incoming[owner]

    def owned_by(self, owner: Owner) -> list[Owned]:
        """The trajectories of `owner`, oldest first."""
        return [self._owned[name] for names in self._by_owner.get(owner, {}).values() for name in names]

    def unfinished_count(self) -> int:
        """How many trajectories, of both purposes, have begun and not finished."""
        return len(self._owned) + sum(map(len, self._lost.values()))

    def _put(self, name: str, owned: Owned) -> None:
        purpose = owned.work.prompt.purpose
        self._owned[name] = owned
        self.unfinished_training += purpose == "train"
        self._by_owner.setdefault(owned.owner, {"train": {}, "evaluation": {}})[purpose][name] = None

    def owned(self, name: str) -> Owned | None:
        """The entry of `name` if it has an owner."""
        return self._owned.get(name)

    def unfinished(self, name: str) -> Owned | None:
        """The entry of `name` if it has an owner or has lost it."""
        return self._owned.get(name) or next((lost[name] for lost in self._lost.values() if name in lost), None)

    def lose(self, name: str, *, forgiven: bool = False) -> None:
        """Record that the owner is gone; the trajectory waits for the next one. A `forgiven` start was no attempt."""
        owned = self._take(name)
        if owned is not None:
            if forgiven:
                owned = replace(owned, work=replace(owned.work, attempt=max(0, owned.work.attempt - 1)))
            purpose = owned.work.prompt.purpose
            self._lost[purpose][name] = owned
            self.unfinished_training += purpose == "train"

    def lost(self, purpose: Purpose) -> list[Owned]:
        """Trajectories that wait for their next owner."""
        return list(self._lost[purpose].values())

    def finish(self, name: str) -> Owned | None:
        """Record that `name` has finished; it is outstanding until `release`. Returns its entry if it had an owner."""
        owner = self._owned.get(name)
        entry = self._take(name)
        if entry is not None:
            self._finished[name] = entry
        return owner

    def release(self, name: str) -> None:
        """Remove `name`: it is no longer outstanding."""
        entry = self._take(name)
        if entry is not None:
            self.outstanding_training -= entry.work.prompt.purpose == "train"
            self._release_emission(entry.emission)

    def names(self) -> list[str]:
        """Ids of all trajectories in the table."""
        return [*self._owned, *self._lost["train"], *self._lost["evaluation"], *self._finished]

    def load(self, owner: Owner, purpose: Purpose | None = None) -> int:
        """How many trajectories `owner` has."""
        loads = self._by_owner.get(owner)
        if loads is None:
            return 0
        return len(loads[purpose]) if purpose else sum(map(len, loads.values()))

    def owners(self) -> list[Owner]:
        return list(self._by_owner)

    def orphans(self, is_gone: Callable[[Owner], bool]) -> list[Owned]:
        """The trajectories of owners that are gone, in order of dispatch."""
        gone = [loads for owner, loads in self._by_owner.items() if is_gone(owner)]
        names = [name for loads in gone for names in loads.values() for name in names]
        return sorted((self._owned[name] for name in names), key=lambda owned: owned.work.lease)

    def oldest_emission(self) -> int | None:
        """The oldest emission with an assignment that a restart needs."""
        return next(iter(self._emission_uses), None)

    def _take(self, name: str) -> Owned | None:
        """Remove trajectory `name` in any state."""
        self.cancel_hand_over(name)
        owned = self._owned.pop(name, None)
        if owned is None:
            for purpose, names in self._lost.items():
                if name in names:
                    self.unfinished_training -= purpose == "train"
                    return names.pop(name)
            return self._finished.pop(name, None)
        self.unfinished_training -= owned.work.prompt.purpose == "train"
        loads = self._by_owner[owned.owner]
        del loads[owned.work.prompt.purpose][name]
        if not any(loads.values()):
            del self._by_owner[owned.owner]
        return owned

    def _release_emission(self, emission: int) -> None:
        self._emission_uses[emission] -= 1
        if not self._emission_uses[emission]:
            del self._emission_uses[emission]


def failed_trajectory(owned: Owned, reason: str, newest: PolicyVersion | None, now: int) -> Trajectory:
    """The failed Trajectory that placement writes for work that nobody will generate, so that its group completes."""
    work = owned.work
    return Trajectory(
        prompt=work.prompt,
        member=work.member,
        lease=work.lease,
        attempt=work.attempt,
        replica=owned.replica,
        incarnation=owned.incarnation,
        response=Response(token_ids([]), floats([]), flags([])),
        text="",
        version_spans=(),
        newest_version=newest,
        finish_reason="failed",
        error=reason,
        started_at=now,
        first_token_at=None,
        finished_at=now,
    )


class Leases:
    """Rising numbers; `last` is the latest one minted. Only placement mints them, so a lease above it is invalid."""

    def __init__(self, last: int) -> None:
        self.last = last

    def mint(self) -> int:
        """The next lease."""
        self.last += 1
        return self.last
