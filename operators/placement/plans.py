"""A plan as a record: which trajectories go where, and the load of all it touches before and after."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from operators.placement.repack import Load, Move
from schemas.records import PlannedMove, PolicyVersion, RepackPlan, ReplicaLoad


def plan_record(
    plan_id: str,
    version: PolicyVersion,
    loads: Sequence[Load],
    moves: Sequence[Move],
    names_at: Callable[[int], Sequence[str]],
    now: int,
) -> RepackPlan:
    """The plan to make `moves` among replicas with these `loads`; `names_at` tells what a source has, oldest first."""
    given: dict[int, int] = {}
    planned = []
    for move in moves:
        first = given.get(move.source, 0)
        given[move.source] = first + move.requests
        names = tuple(names_at(move.source)[first : first + move.requests])
        planned.append(PlannedMove(move.source, move.destination, names, move.kv))
    touched = [load for load in loads if any(load.replica in (move.source, move.destination) for move in moves)]
    return RepackPlan(
        plan_id=plan_id,
        policy_version=version,
        moves=tuple(planned),
        before=tuple(ReplicaLoad(load.replica, load.kv_used, load.kv_capacity, load.requests) for load in touched),
        after=tuple(_after(load, moves) for load in touched),
        reason="drain" if all(load.leaving for load in touched if load.replica in given) else "repack",
        planned_at=now,
    )


def _after(load: Load, moves: Sequence[Move]) -> ReplicaLoad:
    kv, requests = load.kv_used, load.requests
    for move in moves:
        sign = (move.destination == load.replica) - (move.source == load.replica)
        kv, requests = kv + sign * move.kv, requests + sign * move.requests
    return ReplicaLoad(load.replica, kv, load.kv_capacity, requests)
