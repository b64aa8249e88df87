"""What one machine's relay is told."""

from __future__ import annotations

from dataclasses import dataclass

AUTO = "auto"


@dataclass(frozen=True)
class RelayConfig:
    """What a machine keeps of a run's weights, and where. Raises ValueError naming the field that does not fit."""

    store: str = AUTO
    """Folder of the machine's weight store; "auto": where `infra.store.ownership.place_store` says."""
    relay: int = 0
    """Number of the relay in its run."""
    keep_versions: int = 4
    """Complete versions that are kept, beside pinned ones. With fewer than max_staleness + 2, a trajectory that moves
    may have to start afresh."""
    heartbeat_s: float = 1.0
    """Seconds between heartbeats, each a transaction: a new version does not make one."""

    def __post_init__(self) -> None:
        if not self.store:
            raise ValueError('store must be a folder, or "auto"')
        if self.relay < 0:
            raise ValueError(f"relay must not be negative, not {self.relay}")
        if self.keep_versions < 1:
            raise ValueError(f"keep_versions must be at least 1, not {self.keep_versions}")
        if not self.heartbeat_s > 0:
            raise ValueError(f"heartbeat_s must be positive, not {self.heartbeat_s}")
