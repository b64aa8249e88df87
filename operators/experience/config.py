"""How the experience buffer makes batches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExperienceConfig:
    """Raises ValueError naming the field that does not fit."""

    global_batch: int = 128
    """Trajectories in a batch, at least: a batch takes whole groups until it has so many."""
    max_staleness: int = 2
    """Bound on staleness at consumption, in versions: admission is paced to it (see placement)."""
    drop_over_age: bool = False
    """Drop what is older than `max_staleness` at consumption. Off: it is trained with off-policy correction, for
    dropping starves long answers."""
    micro_batch_tokens: int = 65_536
    """Tokens in one micro-batch record, which also stays below the size bound of a record."""

    def __post_init__(self) -> None:
        for name, least in (("global_batch", 1), ("max_staleness", 0), ("micro_batch_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
