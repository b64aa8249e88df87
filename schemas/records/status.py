"""Heartbeats, metrics, dead letters and commit notes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from schemas.records.versions import PolicyVersion

ReplicaState = Literal["starting", "loading", "running", "draining", "stopped"]


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica's heartbeat; `process` is the shard of the rollout pipeline that hosts it.

    Written by rollout, read by placement. `capacity` is the number of requests that can run at once. KV is in tokens;
    `step_seconds` is the duration of the last engine step. `reserved` names the plans for whose trajectories it keeps
    room.
    """

    replica: int
    process: int
    incarnation: int
    state: ReplicaState
    policy_version: PolicyVersion | None
    running: int
    waiting: int
    capacity: int
    kv_used: int
    kv_capacity: int
    tokens_generated: int
    step_seconds: float
    host: str
    pid: int
    sent_at: int
    run: str = ""
    reserved: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Metric:
    """Measured values of one kind at one step. Written by every role, read by views, reports and trackers."""

    name: str
    step: int
    values: dict[str, float]
    measured_at: int


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that could not be processed, with its position and payload, so that it can be processed again."""

    step: str
    reason: str
    topic: str
    partition: int
    offset: int
    payload: bytes
    failed_at: int


@dataclass(frozen=True, slots=True)
class CommitNote:
    """The state of the shard `group` as of its last commit, as JSON. Written and read by every pipeline's session."""

    group: str
    note: str
    written_at: int
