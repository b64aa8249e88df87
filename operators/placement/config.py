"""How placement admits, dispatches and gives up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlacementConfig:
    """Raises ValueError naming the field that does not fit."""

    replica_batch: int | None = None
    """Most training assignments a replica gets under one weight version; None: as many as it has slots."""
    max_replicas: int = 8
    """Replicas that a run can grow to: the inbox has a partition for each."""
    prefetch: int = 0
    """Assignments a replica may hold beyond its slots, so that a free slot refills without a round trip."""
    prompt_lead: int = 64
    """How many prompts the prompts pipeline stays ahead of dispatch."""
    heartbeat_timeout_s: float = 10.0
    """Silence after which a replica is fenced and its work dispatched afresh."""
    max_attempts: int = 4
    """Starts of a trajectory before it is finished as failed, so that a prompt that crashes engines ends."""

    def __post_init__(self) -> None:
        for name, least in (
            ("prefetch", 0),
            ("max_replicas", 1),
            ("prompt_lead", 1),
            ("max_attempts", 1),
            ("replica_batch", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if not self.heartbeat_timeout_s > 0:
            raise ValueError(f"heartbeat_timeout_s must be positive, not {self.heartbeat_timeout_s}")
