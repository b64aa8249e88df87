"""The record of a plan: its moves, and the loads of the replicas involved before and after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from operators.placement.repack import KVLoad, Move
from schemas.records import PlannedMove, PolicyVersion, RepackPlan, ReplicaLoad


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
