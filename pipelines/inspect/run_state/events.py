"""The events that update a run's state: records of its topics, phases, process states, lag."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from schemas.records import Metric, RelayArrival, RelayStatus, ReplicaStatus, StageStatus, WeightVersion


@dataclass(frozen=True, slots=True)
class PhaseStarted:
    """The run entered `phase` at `at`, in Unix milliseconds."""

    phase: str
    at: int


@dataclass(frozen=True, slots=True)
class CheckStarted:
    """Before the start, the run began to check `subject` at `at`, in Unix milliseconds."""

    subject: str
    at: int


RoleStatus = Literal["starting", "up", "down", "ended"]
"""`down`: died and will be restarted. `ended`: completed or stopped."""


@dataclass(frozen=True, slots=True)
class RoleState:
    """A process of the run, as reported by its supervisor. `pid`: that of the newest start, None before the first."""

    pid: int | None
    restarts: int
    status: RoleStatus

    @property
    def alive(self) -> bool:
        return self.status == "up"


@dataclass(frozen=True, slots=True)
class RolesChanged:
    """The new states of all processes of the run, by name."""

    roles: Mapping[str, RoleState]


@dataclass(frozen=True, slots=True)
class LagMeasured:
    """Consumer lag in records, by the short name of the topic; `inbox` is that of each replica, if it is known."""

    behind: Mapping[str, int]
    inbox: Mapping[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    """The time is `at`, in Unix milliseconds."""

    at: int


HeartbeatRecord = ReplicaStatus | StageStatus | RelayStatus | RelayArrival
RunEvent = Metric | WeightVersion | HeartbeatRecord | PhaseStarted | CheckStarted | RolesChanged | LagMeasured | Tick
GOAL_REACHED = "goal reached"
"""The phase of a submitted run with all optimizer steps, whose roles have not been stopped."""


def work_phase(step: int, goal: int | None) -> str:
    """The phase of a run with `step` optimizer steps whose phases no supervisor records."""
    if goal and step >= goal:
        return GOAL_REACHED
    return "training" if step else "starting"
