"""What placement decides to move, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from schemas.records.versions import PolicyVersion


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica's load: KV in tokens, and requests that run or wait."""

    replica: int
    kv_used: int
    kv_capacity: int
    requests: int


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """These trajectories, with `kv` tokens, go from one replica to another; without any, they wait there."""

    source: int
    destination: int
    trajectory_ids: tuple[str, ...]
    kv: int


@dataclass(frozen=True, slots=True)
class RepackPlan:
    """Moves among the replicas of one weight version, with the load of all it touches before and after.

    Made by placement, for people and tools. `after` is what the plan aims at. The `reason` is that of its moves: to
    empty replicas, because they are to drain, or, if all of them are so, that what waits can run elsewhere at once.
    """

    plan_id: str
    policy_version: PolicyVersion
    moves: tuple[PlannedMove, ...]
    before: tuple[ReplicaLoad, ...]
    after: tuple[ReplicaLoad, ...]
    reason: Literal["repack", "drain", "level"]
    planned_at: int


@dataclass(frozen=True, slots=True)
class MoveOutcome:
    """What became of one move of plan `plan_id`, written once the outcome of each of its trajectories is known.

    Written by placement, for people and tools. `handed_over`: moved. `finished`: ended before the move. `rejected`: the
    destination had no room, or the source did not release them in time. `lost`: source or destination was gone. Those
    that did not move go on at the source or elsewhere.
    """

    plan_id: str
    source: int
    destination: int
    handed_over: tuple[str, ...]
    finished: tuple[str, ...]
    rejected: tuple[str, ...]
    lost: tuple[str, ...]
    ended_at: int
