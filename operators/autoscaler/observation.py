"""What the autoscaler observes of a run, at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Observation:
    """The load at `at`, in seconds of the autoscaler's monotonic clock. A measurement that is not known is None.

    `running` rollout processes have loaded weights and do not drain; their replicas have `slots` slots for `requests`
    requests that run or wait there; for another `waiting` trajectories no replica has room. `rollout_idle` is the share
    of these replicas without a request. `trainer_idle` is the share of time in which the trainer waits for batches,
    `staleness` the mean of trajectories that were settled lately, in versions. `price` is that of a process.
    `time_of_day` is in seconds since midnight, UTC. Nothing is decided while the run is `paused`.
    """

    at: float
    running: int
    slots: int = 0
    requests: int = 0
    waiting: int = 0
    rollout_idle: float | None = None
    trainer_idle: float | None = None
    staleness: float | None = None
    price: float | None = None
    time_of_day: int = 0
    paused: bool = False

    @property
    def requests_per_slot(self) -> float | None:
        """The requests that run or wait, at replicas or in placement, per slot; None without slots."""
        return (self.requests + self.waiting) / self.slots if self.slots else None
