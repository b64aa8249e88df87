"""How large a cycle under test is."""

from __future__ import annotations

from dataclasses import dataclass

from operators.experience.config import OverAge
from operators.placement.config import PlacementConfig
from operators.placement.schedules import Schedule

TIMEOUT_S = 3.0


@dataclass(frozen=True)
class SimulationConfig:
    """How large a cycle is, and how its numbers fit each other."""

    prompts: int = 40
    samples: int = 3
    global_batch: int = 7
    staleness: int = 1
    processes: int = 2
    replicas: int = 1
    slots: int = 4
    questions: int = 3
    failing: int = 11
    """One trajectory of so many comes to nothing."""
    too_long: int = 13
    """One prompt of so many is longer than any replica's context."""
    longest: int = 5
    """Trajectories are of 1 to so many tokens."""
    kv_capacity: int = 1000
    progress_tokens: int = 512
    drains: bool = False
    """Whether replicas are asked to drain, now and then."""
    schedule: Schedule = "laminar"
    shards: int = 1
    """Of the buffer."""
    over_age: OverAge = "correct"

    @property
    def placement(self) -> PlacementConfig:
        return PlacementConfig(schedule=self.schedule, heartbeat_timeout_s=TIMEOUT_S, max_attempts=10**6, repack_s=1.0)

    @property
    def admitted(self) -> int:
        return self.placement.admitted(self.global_batch, self.staleness)
