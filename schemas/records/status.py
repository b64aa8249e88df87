"""What processes say of themselves, and what could not be processed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from schemas.records.versions import PolicyVersion

ReplicaState = Literal["starting", "loading", "running", "draining", "stopped"]


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica's heartbeat; `process` is the shard of the rollout pipeline that hosts it.

    Made by rollout, eaten by placement. KV in tokens, `step_seconds` of the last engine step. `reserved` names the
    plans for whose trajectories it keeps room.
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
    """Measured values of one kind at one step. Made by every role, eaten by watchers and trackers."""

    name: str
    step: int
    values: dict[str, float]
    measured_at: int


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that could not be processed, with what it takes to process it again: where it stood, and its payload."""

    step: str
    reason: str
    topic: str
    partition: int
    offset: int
    payload: bytes
    failed_at: int


@dataclass(frozen=True, slots=True)
class CommitNote:
    """The state of the shard `group` as of its last commit, as JSON.

    Made and eaten by every pipeline's session.
    """

    group: str
    note: str
    written_at: int
