"""Moves from plan to hand-over: room is reserved at the destination first, then the source is told to let go.

A plan that its destination does not answer in time is given up, and nothing has moved. From the release on the source
owns until its hand-over is committed, the destination after; who dies in between has its work taken on by others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from operators.io.elements import Output
from operators.placement.config import PlacementConfig
from operators.placement.leases import Leases
from operators.placement.plans import plan_record
from operators.placement.queue_balancing import plan_queue_balancing
from operators.placement.repack import Load, Move, plan_repack
from operators.placement.replicas import ReplicaTable, TrackedReplica
from operators.placement.tracking import Tracking
from operators.placement.work import HandOver, Owner
from schemas.records import PolicyVersion, Release, Reserve
from schemas.topics import INBOX, PLANS


@dataclass(frozen=True, slots=True)
class _Proposed:
    """A move that its destination has been asked to keep room for."""

    plan_id: str
    source: Owner
    destination: Owner
    names: tuple[str, ...]
    until: float


@dataclass(frozen=True, slots=True)
class _Released:
    """What its source has been told to let go; `until` then it may take to do so."""

    source: Owner
    destination: Owner
    names: tuple[str, ...]
    until: float


class Moving:
    """Plans moves every `repack_s` seconds and after each global batch, and sees them through.

    `nothing_fresh` tells that no replica would get anything fresh: then an idle one takes of others' queues.
    """

    def __init__(
        self,
        config: PlacementConfig,
        tracking: Tracking,
        replicas: ReplicaTable,
        leases: Leases,
        start: int,
        now: Callable[[], int],
        nothing_fresh: Callable[[], bool],
    ) -> None:
        self._config, self._tracking, self._replicas, self._leases = config, tracking, replicas, leases
        self._nothing_fresh = nothing_fresh
        self._start, self._now = start, now
        self._plans = 0
        self._due_at = 0.0
        self._planned_for: PolicyVersion | None = None
        self._proposed: list[_Proposed] = []
        self._released: list[_Released] = []

    def resume(self, clock: float) -> None:
        """Take on what an earlier start had told sources to let go."""
        until = clock + self._config.heartbeat_timeout_s
        for (source, to), names in self._tracking.table.all_leaving().items():
            self._released.append(_Released(source, to, tuple(names), until))

    def involves(self, owner: Owner) -> bool:
        """Whether `owner` is to give or get trajectories."""
        if not self._proposed and not self._released:
            return False
        asked = any(owner in (each.source, each.destination) for each in self._proposed)
        return (
            asked or any(owner == each.source for each in self._released) or bool(self._tracking.table.expected(owner))
        )

    def go_on(self, clock: float) -> list[Output]:
        """What is to be written now: releases where room is kept, and new plans when it is time for them."""
        alive = self._replicas.alive()
        if len(alive) < 2 and not self._proposed and not self._released:
            return []
        outputs = self._advance(clock)
        newest, leaving = self._tracking.newest, any(replica.status.state == "draining" for replica in alive)
        batch_done, self._planned_for = newest != self._planned_for, newest
        if (self._config.rules.repack or leaving) and (batch_done or clock >= self._due_at):
            self._due_at = clock + self._config.repack_s
            outputs += self._plan(alive, clock)
        ended = self._tracking.outcomes.take_ended(self._now())
        return [*outputs, *(Output(PLANS, each.plan_id, each) for each in ended)]

    # -- planning -----------------------------------------------------------------------------------------------------

    def _plan(self, alive: Sequence[TrackedReplica], clock: float) -> list[Output]:
        groups: dict[PolicyVersion, list[TrackedReplica]] = {}
        for replica in alive:
            version = replica.version
            works = replica.status.state in ("running", "draining")
            if version is not None and works and not self.involves(replica.owner):
                groups.setdefault(version, []).append(replica)
        outputs: list[Output] = []
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

    def _load(self, replica: TrackedReplica) -> Load:
        """What the last heartbeat says, with the requests that placement has sent since."""
        status, tracking = replica.status, self._tracking
        requests = tracking.table.load(replica.owner)
        each = tracking.lengths.kv()
        growth = tracking.lengths.growth(status.kv_used / max(1, status.running), requests)
        # What has come to it since that heartbeat, or waits there, holds no KV yet and will.
        coming = max(0, requests - status.running)
        waiting = status.waiting
        if coming - waiting > status.running + waiting:
            # Few may have ended and not been told yet; where most are unseen it has only begun, and is not nearly done.
            waiting = max(1, requests - int(status.kv_capacity / each)) if each else requests
        return Load(
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
        self, version: PolicyVersion, loads: Sequence[Load], moves: Sequence[Move], clock: float
    ) -> list[Output]:
        """Write a plan, and ask each of its destinations to keep room for what comes to it."""
        self._plans += 1
        plan_id = f"{self._start}-{self._plans}"
        names = {move.source: self._names_at(move.source) for move in moves}
        plan = plan_record(plan_id, version, loads, moves, names.__getitem__, self._now())
        until = clock + self._config.heartbeat_timeout_s
        outputs = []
        for move in plan.moves:
            self._tracking.outcomes.plan(plan_id, move.source, move.destination, move.trajectory_ids)
        for destination in dict.fromkeys(move.destination for move in plan.moves):
            coming = [move for move in plan.moves if move.destination == destination]
            part, to = f"{plan_id}.{destination}", self._owner_of(destination)
            for move in coming:
                self._proposed.append(_Proposed(part, self._owner_of(move.source), to, move.trajectory_ids, until))
            expected = tuple(name for move in coming for name in move.trajectory_ids)
            reserve = Reserve(part, version, expected, sum(move.kv_tokens for move in coming), *to)
            outputs.append(Output(INBOX, "", reserve, destination))
        return [*outputs, Output(PLANS, plan_id, plan)]

    def _names_at(self, replica: int) -> list[str]:
        return [owned.work.trajectory_id for owned in self._tracking.table.at(self._owner_of(replica))]

    def _owner_of(self, replica: int) -> Owner:
        incarnation = self._replicas.incarnation(replica)
        assert incarnation is not None
        return Owner(replica, incarnation)

    # -- carrying out -------------------------------------------------------------------------------------------------

    def _advance(self, clock: float) -> list[Output]:
        outputs: list[Output] = []
        kept: list[_Proposed] = []
        for each in self._proposed:
            replica = self._replicas.find(each.destination)
            names = tuple(name for name in each.names if self._is_at(name, each.source))
            if replica is None or not names or clock > each.until:
                for name in each.names:
                    self._tracking.call_off(each.destination, name)
                    self._tracking.outcomes.record(name, "lost" if replica is None else "rejected")
            elif each.plan_id in replica.status.reserved:
                outputs.append(self._release(each, names, clock))
            else:
                kept.append(each)
        self._proposed = kept
        for order in self._released.copy():
            if clock > order.until or not self._gives(order):
                self._released.remove(order)
                self._give_up(order)
        return outputs

    def _gives(self, each: _Released) -> bool:
        """Whether the source still has something that it was told to let go."""
        leaving = self._tracking.table.leaving
        return any(leaving(name) is not None and self._is_at(name, each.source) for name in each.names)

    def _give_up(self, each: _Released) -> None:
        """Nobody waits any more for what has not been handed over; if it is after all, that counts."""
        for name in each.names:
            if not self._is_at(name, each.destination):
                self._tracking.call_off(each.destination, name)
            if self._is_at(name, each.source):
                self._tracking.table.stay(name)
                self._tracking.outcomes.record(name, "rejected")

    def _release(self, each: _Proposed, names: tuple[str, ...], clock: float) -> Output:
        leases = tuple(self._leases.mint() for _ in names)
        for name, lease in zip(names, leases, strict=True):
            self._tracking.table.release_to(name, HandOver(lease, each.destination))
        for name in each.names:
            if name not in names:
                self._tracking.call_off(each.destination, name)
        until = clock + self._config.heartbeat_timeout_s
        self._released.append(_Released(each.source, each.destination, names, until))
        order = Release(each.plan_id, names, leases, *each.destination, *each.source)
        return Output(INBOX, "", order, each.source.replica)

    def _is_at(self, name: str, owner: Owner) -> bool:
        owned = self._tracking.table.owner(name)
        return owned is not None and owned.owner == owner
