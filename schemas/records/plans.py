"""Moves of trajectories that placement plans, and their outcomes."""

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
    """These trajectories, with `kv_tokens` tokens, move from one replica to another. With 0 tokens they are waiting."""

    source: int
    destination: int
    trajectory_ids: tuple[str, ...]
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class RepackPlan:
    """Moves among the replicas of one weight version, with the load of all replicas concerned before and after.

    Written by placement, for people and tools. `after` is the expected load. `reason` is that of the moves: `repack`
    empties replicas, `drain` empties those that drain, `balance` moves requests that run sooner elsewhere: waiting
    ones, or those of a stage group, to a member that has become complete.
    """

    plan_id: str
    policy_version: PolicyVersion
    moves: tuple[PlannedMove, ...]
    before: tuple[ReplicaLoad, ...]
    after: tuple[ReplicaLoad, ...]
    reason: Literal["repack", "drain", "balance"]
    planned_at: int


@dataclass(frozen=True, slots=True)
class MoveOutcome:
    """The outcome of one move of plan `plan_id`, written once the outcome of each of its trajectories is known.

    Written by placement, for people and tools. `handed_over`: moved. `finished`: ended before the move. `rejected`: the
    destination had no room, or the source did not release them in time. `lost`: source or destination was gone.
    Trajectories that did not move continue at the source or elsewhere.
    """

    plan_id: str
    source: int
    destination: int
    handed_over: tuple[str, ...]
    finished: tuple[str, ...]
    rejected: tuple[str, ...]
    lost: tuple[str, ...]
    ended_at: int
