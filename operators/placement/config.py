"""How placement admits, dispatches, moves and gives up."""

from __future__ import annotations

from dataclasses import dataclass, replace

from operators.placement.schedules import SCHEDULES, Refresh, Rules, Schedule


@dataclass(frozen=True)
class PlacementConfig:
    """Raises ValueError naming the field that does not fit."""

    schedule: Schedule = "laminar"
    """Whose way of letting trajectories and weights meet; the next three change single knobs of it."""
    admitted_batches: int | None = None
    """Global batches that may be outstanding; None: as the schedule has it."""
    refresh: Refresh | None = None
    """When replicas take newer weights; None: as the schedule has it."""
    repack: bool | None = None
    """Whether trajectories move, so that replicas are free for newer weights; None: as the schedule has it."""
    repack_s: float = 5.0
    """How often moves are planned, in seconds; after each global batch besides."""
    repack_kv: float = 0.99
    """The share of a replica's KV that moves may fill."""
    repack_requests: int | None = None
    """Requests that a replica may have by moves, where its decoding stops being free; None: its slots."""
    replica_batch: int | None = None
    """Most training assignments a replica gets under one weight version; None: as many as it has slots."""
    max_replicas: int = 8
    """Replicas that a run can grow to: the inbox has a partition for each."""
    prefetch: int | None = None
    """Assignments a replica may hold beyond what its slots and its KV take at once, by the lengths seen last. None:
    its batch as a whole, of which the engine lets in what fits, so that its KV is full until nothing waits any more."""
    prompt_lead: int = 64
    """How many prompts the prompts pipeline stays ahead of dispatch."""
    heartbeat_timeout_s: float = 10.0
    """Silence after which a replica is fenced and its work goes on elsewhere."""
    max_attempts: int = 4
    """Starts of a trajectory that come to nothing before it is finished as failed, so that a prompt that crashes
    engines ends."""

    def __post_init__(self) -> None:
        for name, least in (
            ("prefetch", 0),
            ("max_replicas", 1),
            ("prompt_lead", 1),
            ("max_attempts", 1),
            ("replica_batch", 1),
            ("admitted_batches", 1),
            ("repack_requests", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        for name in ("heartbeat_timeout_s", "repack_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if not 0 < self.repack_kv <= 1:
            raise ValueError(f"repack_kv must be in (0, 1], not {self.repack_kv}")

    @property
    def rules(self) -> Rules:
        """The schedule's rules, with what this configuration changes."""
        knobs = {name: getattr(self, name) for name in ("admitted_batches", "refresh", "repack")}
        return replace(SCHEDULES[self.schedule], **{name: knob for name, knob in knobs.items() if knob is not None})

    def admitted(self, global_batch: int, max_staleness: int) -> int:
        """Training trajectories that may be dispatched and not settled."""
        batches = self.rules.admitted_batches
        return global_batch * (max_staleness + 1 if batches is None else batches)
