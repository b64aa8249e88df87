"""Moves from plan to hand-over: the destination reserves room, then the source gets a Release for the trajectories.

If the destination does not reply in time, the move is dropped and nothing has changed. After the Release the source
owns a trajectory until its hand-over is committed, the destination from then on. Work of a replica that dies in between
is assigned again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from operators.io.elements import Output
from operators.io.repartition import Moved, MoveReason
from operators.placement.config import PlacementConfig
from operators.placement.queue_balancing import plan_queue_balancing
from operators.placement.repack import KVLoad, Move, plan_repack
from operators.placement.replicas import ReplicaTable, TrackedReplica
from operators.placement.tracking import TrajectoryTracker
from operators.placement.work_table import HandOver, Leases, Owner
from schemas.records import PlannedMove, PolicyVersion, Release, RepackPlan, ReplicaLoad, Reserve
from schemas.topics import PLANS


@dataclass(frozen=True, slots=True)
class _ReservedMove:
    """A move whose destination has been sent a Reserve."""

    plan_id: str
    source: Owner
    destination: Owner
    names: tuple[str, ...]
    until: float
    reason: MoveReason


@dataclass(frozen=True, slots=True)
class _ReleasedMove:
    """A move whose source has been sent a Release, which expires at `until`."""

    source: Owner
    destination: Owner
    names: tuple[str, ...]
    until: float


class MoveCoordinator:
    """Plans moves every `repack_s` seconds, after each global batch and when a replica begins to drain, and carries
    them out.

    While `has_no_fresh_work()` is True, idle replicas may also take waiting requests of others. Replicas that lead a
    stage group give requests away only to members that have become whole, unless they drain.
    """

    def __init__(
        self,
        config: PlacementConfig,
        tracking: TrajectoryTracker,
        replicas: ReplicaTable,
        leases: Leases,
        start: int,
        now: Callable[[], int],
        has_no_fresh_work: Callable[[], bool],
        leads: Callable[[int], bool] = lambda replica: False,
    ) -> None:
        self._config, self._tracking, self._replicas, self._leases = config, tracking, replicas, leases
        self._nothing_fresh, self._leads = has_no_fresh_work, leads
        self._start, self._now = start, now
        self._plans = 0
        self._next_plan_at = 0.0
        self._planned_for: PolicyVersion | None = None
        self._leaving: set[Owner] = set()
        """The replicas that drained when this was called last."""
        self._reserved: list[_ReservedMove] = []
        self._released: list[_ReleasedMove] = []

    def resume(self, clock: float) -> None:
        """Continue the moves that an earlier start had released."""
        until = clock + self._config.heartbeat_timeout_s
        for (source, to), names in self._tracking.table.hand_overs().items():
            self._released.append(_ReleasedMove(source, to, tuple(names), until))

    def involves(self, owner: Owner) -> bool:
        """Whether `owner` is the source or destination of a move."""
        if not self._reserved and not self._released:
            return False
        reserved = any(owner in (each.source, each.destination) for each in self._reserved)
        released = any(owner == each.source for each in self._released)
        return reserved or released or bool(self._tracking.table.incoming(owner))

    def advance(
        self, clock: float, switches: Sequence[tuple[int, Sequence[int], int]] = ()
    ) -> list[Output | Reserve | Moved]:
        """The outputs of now: decisions about reserved moves, and new plans when they are due.

        `switches` has the stage groups with whole members: leader, whole members, number of the others.
        """
        alive = self._replicas.alive()
        if len(alive) < 2 and not self._reserved and not self._released:
            return []
        outputs: list[Output | Reserve | Moved] = [*self._release_reserved(clock)]
        for leader, whole, others in switches:
            outputs += self._switch(leader, whole, others, clock)
        newest, leaving = self._tracking.newest, {each.owner for each in alive if each.status.state == "draining"}
        urgent = newest != self._planned_for or not leaving <= self._leaving
        self._planned_for, self._leaving = newest, leaving
        if (self._config.rules.repack or leaving) and (urgent or clock >= self._next_plan_at):
            self._next_plan_at = clock + self._config.repack_s
            outputs += self._plan(alive, clock)
        ended = self._tracking.outcomes.take_ended(self._now())
        return [*outputs, *(Output(PLANS, each.plan_id, each) for each in ended)]

    # -- planning -----------------------------------------------------------------------------------------------------

    def _plan(self, alive: Sequence[TrackedReplica], clock: float) -> list[Output | Reserve]:
        groups: dict[PolicyVersion, list[TrackedReplica]] = {}
        for replica in alive:
            version = replica.version
            works = replica.status.state in ("running", "draining")
            stays = self._leads(replica.status.replica) and replica.status.state == "running"
            if version is not None and works and not stays and not self.involves(replica.owner):
                groups.setdefault(version, []).append(replica)
        outputs: list[Output | Reserve] = []
        for version, replicas in sorted(groups.items()):
            loads = [self._load(replica) for replica in replicas]
            share, repacks = self._config.repack_kv, self._config.rules.repack
            moves = plan_repack(loads, share, only_leaving=not repacks)
            if repacks and (fresh_kv := int(self._tracking.lengths.kv())):
                idle_too = version == self._tracking.newest and self._nothing_fresh()
                moves += plan_queue_balancing(loads, moves, fresh_kv, share, idle_too=idle_too)
            if moves:
                outputs += self._propose(version, loads, moves, clock)
        for replica in alive:
            replica.kv_before = replica.status.kv_used
        return outputs

    def _switch(self, leader: int, whole: Sequence[int], others: int, clock: float) -> list[Output | Reserve]:
        """Move their shares of a stage group's requests, with KV, to the members that have the whole version."""
        tracked = {replica.status.replica: replica for replica in self._replicas.alive()}
        source = tracked.get(leader)
        if source is None or source.version is None or self.involves(source.owner):
            return []
        takers = [
            tracked[replica]
            for replica in whole
            if replica in tracked
            and tracked[replica].status.state == "running"
            and tracked[replica].version == source.version
            and not self.involves(tracked[replica].owner)
        ]
        loads = [self._load(replica) for replica in (source, *takers)]
        moves = plan_shares(loads[0], loads[1:], others, self._config.repack_kv)
        return self._propose(source.version, loads, moves, clock, "balance") if moves else []

    def _load(self, replica: TrackedReplica) -> KVLoad:
        """The load from the last heartbeat, plus the requests assigned since."""
        status, tracking = replica.status, self._tracking
        requests = tracking.table.load(replica.owner)
        each = tracking.lengths.kv()
        growth = tracking.lengths.growth(status.kv_used / max(1, status.running), requests)
        # Requests assigned since that heartbeat, and waiting ones, hold no KV yet but will.
        coming = max(0, requests - status.running)
        waiting = status.waiting
        if coming - waiting > status.running + waiting:
            # Few requests can have ended unreported. If most are not in the heartbeat, the replica has just started.
            waiting = max(1, requests - int(status.kv_capacity / each)) if each else requests
        return KVLoad(
            replica=status.replica,
            kv_used=min(status.kv_capacity, status.kv_used + int(coming * each)),
            kv_capacity=status.kv_capacity,
            kv_before=replica.kv_before,
            requests=requests,
            waiting=waiting,
            most_requests=min(status.capacity, self._config.repack_requests or status.capacity),
            growth=int(growth),
            leaving=status.state == "draining",
        )

    def _propose(
        self,
        version: PolicyVersion,
        loads: Sequence[KVLoad],
        moves: Sequence[Move],
        clock: float,
        reason: MoveReason | None = None,
    ) -> list[Output | Reserve]:
        """Write a plan, and a Reserve to each of its destinations."""
        self._plans += 1
        plan_id = f"{self._start}-{self._plans}"
        owned = {move.source: self._tracking.table.owned_by(self._owner_of(move.source)) for move in moves}
        names = {source: [each.work.trajectory_id for each in found] for source, found in owned.items()}
        plan = plan_record(plan_id, version, loads, moves, names.__getitem__, self._now(), reason)
        until = clock + self._config.heartbeat_timeout_s
        outputs: list[Output | Reserve] = []
        for move in plan.moves:
            self._tracking.outcomes.plan(plan_id, move.source, move.destination, move.trajectory_ids)
        for destination in dict.fromkeys(move.destination for move in plan.moves):
            coming = [move for move in plan.moves if move.destination == destination]
            part, to = f"{plan_id}.{destination}", self._owner_of(destination)
            for move in coming:
                source = self._owner_of(move.source)
                self._reserved.append(_ReservedMove(part, source, to, move.trajectory_ids, until, plan.reason))
            expected = tuple(name for move in coming for name in move.trajectory_ids)
            outputs.append(Reserve(part, version, expected, sum(move.kv_tokens for move in coming), *to))
        return [*outputs, Output(PLANS, plan_id, plan)]

    def _owner_of(self, replica: int) -> Owner:
        incarnation = self._replicas.incarnation(replica)
        assert incarnation is not None
        return Owner(replica, incarnation)

    # -- execution -----------------------------------------------------------------------------------------------------

    def _release_reserved(self, clock: float) -> list[Moved]:
        """Release the moves whose room is reserved; drop reservations and releases that have expired."""
        outputs: list[Moved] = []
        kept: list[_ReservedMove] = []
        for each in self._reserved:
            replica = self._replicas.find(each.destination)
            names = tuple(name for name in each.names if self._is_at(name, each.source))
            if replica is None or not names or clock > each.until:
                for name in each.names:
                    self._tracking.cancels.add(each.destination, name, 0)
                    self._tracking.outcomes.record(name, "lost" if replica is None else "rejected")
            elif each.plan_id in replica.status.reserved:
                outputs.append(self._release(each, names, clock))
            else:
                kept.append(each)
        self._reserved = kept
        for release in self._released.copy():
            if clock > release.until or not self._is_open(release):
                self._released.remove(release)
                self._close(release)
        return outputs

    def _is_open(self, each: _ReleasedMove) -> bool:
        """Whether the source still has a trajectory that it has to release."""
        hand_over_of = self._tracking.table.hand_over_of
        return any(hand_over_of(name) is not None and self._is_at(name, each.source) for name in each.names)

    def _close(self, each: _ReleasedMove) -> None:
        """Stop waiting for trajectories that were not handed over. A hand-over that arrives later still counts."""
        for name in each.names:
            if not self._is_at(name, each.destination):
                self._tracking.cancels.add(each.destination, name, 0)
            if self._is_at(name, each.source):
                self._tracking.table.cancel_hand_over(name)
                self._tracking.outcomes.record(name, "rejected")

    def _release(self, each: _ReservedMove, names: tuple[str, ...], clock: float) -> Moved:
        leases = tuple(self._leases.mint() for _ in names)
        for name, lease in zip(names, leases, strict=True):
            self._tracking.table.start_hand_over(name, HandOver(lease, each.destination))
        for name in each.names:
            if name not in names:
                self._tracking.cancels.add(each.destination, name, 0)
        until = clock + self._config.heartbeat_timeout_s
        self._released.append(_ReleasedMove(each.source, each.destination, names, until))
        release = Release(
            plan_id=each.plan_id,
            trajectory_ids=names,
            leases=leases,
            destination=each.destination.replica,
            destination_incarnation=each.destination.incarnation,
            replica=each.source.replica,
            incarnation=each.source.incarnation,
            without_kv=not self._replicas.can_fetch(each.destination, each.source),
        )
        return Moved(release, each.reason)

    def _is_at(self, name: str, owner: Owner) -> bool:
        owned = self._tracking.table.owned(name)
        return owned is not None and owned.owner == owner


def plan_record(
    plan_id: str,
    version: PolicyVersion,
    loads: Sequence[KVLoad],
    moves: Sequence[Move],
    names_at: Callable[[int], Sequence[str]],
    now: int,
    reason: Literal["repack", "drain", "balance"] | None = None,
) -> RepackPlan:
    """The plan with `moves` among replicas with `loads`; `names_at` returns the ids at a source, oldest first.

    `reason` is that of the moves; None: it follows from them.
    """
    left: dict[int, list[str]] = {}
    planned = []
    for move in moves:
        names = left.setdefault(move.source, list(names_at(move.source)))
        chosen = slice(len(names) - move.requests, None) if move.waiting else slice(move.requests)
        planned.append(PlannedMove(move.source, move.destination, tuple(names[chosen]), move.kv))
        del names[chosen]
    involved = [load for load in loads if any(load.replica in (move.source, move.destination) for move in moves)]
    return RepackPlan(
        plan_id=plan_id,
        policy_version=version,
        moves=tuple(planned),
        before=tuple(ReplicaLoad(load.replica, load.kv_used, load.kv_capacity, load.requests) for load in involved),
        after=tuple(_after(load, moves) for load in involved),
        reason=reason or _reason(involved, moves),
        planned_at=now,
    )


def _reason(involved: Sequence[KVLoad], moves: Sequence[Move]) -> Literal["repack", "drain", "balance"]:
    """The reason to record for a plan."""
    if all(move.waiting for move in moves):
        return "balance"
    sources = {move.source for move in moves}
    return "drain" if all(load.leaving for load in involved if load.replica in sources) else "repack"


def _after(load: KVLoad, moves: Sequence[Move]) -> ReplicaLoad:
    kv, requests = load.kv_used, load.requests
    for move in moves:
        sign = (move.destination == load.replica) - (move.source == load.replica)
        kv, requests = kv + sign * move.kv, requests + sign * move.requests
    return ReplicaLoad(load.replica, kv, load.kv_capacity, requests)


def plan_shares(leader: KVLoad, whole: Sequence[KVLoad], others: int, kv_share: float = 0.99) -> list[Move]:
    """Moves from `leader` that give each of the `whole` members an even share of the requests.

    The `others` members, the leader included, keep theirs. A member that lacks less than a quarter of its share gets
    nothing, because a move costs the transfer of KV. No member exceeds `kv_share` of its KV, growth included, or
    its maximum number of requests.
    """
    total = leader.requests + sum(load.requests for load in whole)
    share = total // max(1, len(whole) + others)
    left, moves = leader.requests, []
    each = max(1, -(-(leader.kv_used + leader.growth) // max(1, leader.requests)))
    for load in whole:
        room = min(load.most_requests - load.requests, (int(kv_share * load.kv_capacity) - load.kv_used) // each)
        count = min(share - load.requests, left, room)
        if count > share // 4:
            moves.append(Move(leader.replica, load.replica, count, leader.kv_used * count // leader.requests))
            left -= count
    return moves
