"""The size of a pipeline simulation."""

from __future__ import annotations

from dataclasses import dataclass, field

from operators.experience.config import Component, ExperienceConfig, OverAge
from operators.placement.config import PlacementConfig, Schedule

TIMEOUT_S = 3.0


@dataclass(frozen=True)
class SimulationConfig:
    """The size of a simulated run and its consistent settings."""

    prompts: int = 40
    samples: int = 3
    global_batch: int = 7
    staleness: int = 1
    processes: int = 2
    replicas: int = 1
    slots: int = 4
    questions: int = 3
    failing: int = 11
    """One in so many trajectories fails."""
    too_long: int = 13
    """One in so many prompts is longer than the context of any replica."""
    longest: int = 5
    """Maximum tokens of a trajectory; the minimum is 1."""
    kv_capacity: int = 1000
    progress_tokens: int = 512
    drains: bool = False
    """Whether replicas are drained at random times."""
    schedule: Schedule = "laminar"
    shards: int = 1
    """Shards of the buffer."""
    over_age: OverAge = "correct"
    sampler: Component = field(default_factory=lambda: Component("fifo"))
    levels: int = 0
    """Levels of a curriculum; the role prompts then takes part, but draws nothing."""

    @property
    def buffer(self) -> ExperienceConfig:
        return ExperienceConfig(
            self.global_batch, self.staleness, self.over_age, sampler=self.sampler, shards=self.shards
        )

    @property
    def placement(self) -> PlacementConfig:
        return PlacementConfig(schedule=self.schedule, heartbeat_timeout_s=TIMEOUT_S, max_attempts=10**6, repack_s=1.0)

    @property
    def admitted(self) -> int:
        return self.placement.admitted(self.global_batch, self.staleness)
