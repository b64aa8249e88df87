"""What one machine's relay is told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RelayConfig:
    """What a machine keeps of a run's weights, and where. Raises ValueError naming the field that does not fit."""

    store: str = ""
    """Folder of the machine's weight store; empty: in shared memory, by the run's name."""
    keep_versions: int = 4
    """Complete versions that are kept, beside pinned ones. With fewer than max_staleness + 2, a trajectory that moves
    may have to start afresh."""
    heartbeat_s: float = 1.0
    """Seconds between heartbeats while nothing changes."""

    def __post_init__(self) -> None:
        if self.keep_versions < 1:
            raise ValueError(f"keep_versions must be at least 1, not {self.keep_versions}")
        if not self.heartbeat_s > 0:
            raise ValueError(f"heartbeat_s must be positive, not {self.heartbeat_s}")
