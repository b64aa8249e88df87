"""How the experience buffer makes batches."""

from __future__ import annotations

from dataclasses import dataclass

MOST_TOKENS = 400_000
"""Of one micro-batch record: token, logprob and mask take 8.2 bytes, and a record may have 8 MiB."""


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
    """Tokens in one micro-batch record; a longer sequence has a record of its own."""

    def __post_init__(self) -> None:
        for name, least in (("global_batch", 1), ("max_staleness", 0), ("micro_batch_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.micro_batch_tokens > MOST_TOKENS:
            raise ValueError(f"micro_batch_tokens must be at most {MOST_TOKENS}, not {self.micro_batch_tokens}")
