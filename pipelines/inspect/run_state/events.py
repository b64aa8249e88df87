"""What the watcher of a run hears beside the records of its topics: phases, the health of its processes, lag."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from schemas.records import Metric, RelayStatus, ReplicaStatus, WeightVersion


@dataclass(frozen=True, slots=True)
class PhaseStarted:
    """The run went over to `phase`, at Unix milliseconds `at`."""

    phase: str
    at: int


RoleStatus = Literal["starting", "up", "down", "ended"]
"""`down` has died and is to be started again; `ended` has done its work."""


@dataclass(frozen=True, slots=True)
class RoleState:
    """One process of the run, as its supervisor knows it: `pid` of the newest start, None before the first."""

    pid: int | None
    restarts: int
    status: RoleStatus

    @property
    def alive(self) -> bool:
        return self.status == "up"


@dataclass(frozen=True, slots=True)
class RolesChanged:
    """All processes of the run, by name."""

    roles: Mapping[str, RoleState]


@dataclass(frozen=True, slots=True)
class LagMeasured:
    """Records behind, by the noun of the topic."""

    behind: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Tick:
    """It is `at`, in Unix milliseconds. Nothing else has happened."""

    at: int


Event = Metric | WeightVersion | ReplicaStatus | RelayStatus | PhaseStarted | RolesChanged | LagMeasured | Tick
