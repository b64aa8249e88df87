"""What an emulated trainer is told: how long its steps take."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class TrainerEmulation:
    """The trainer that is emulated. Raises ValueError naming the field that does not fit.

    The default is a 32B model on 16 H800: 8 × 32.8e9 operations a token (six of the update, two of the reference) at
    40 % of 16 × 989 TFLOPS take 41 µs, on top of what a step takes whatever its size. Stall and broadcast are those of
    the Laminar paper's relay tier (arXiv 2510.12633) for 32B on four machines.
    """

    step_s: tuple[tuple[float, float], ...] = ((0.0, 5.0), (1_000_000.0, 46.0))
    """Real tokens of a global batch, prompts included, and the seconds of its step; linear between and beyond."""
    stall_s: float = 0.64
    """Seconds in which the trainer hands its weights over before it goes on."""
    broadcast_s: float = 0.42
    """Seconds from there until the version is complete on every machine."""

    def __post_init__(self) -> None:
        if len(self.step_s) < 2 or any(b[0] <= a[0] or b[1] < a[1] for a, b in pairwise(self.step_s)):
            raise ValueError("step_s must have two rows at least, by rising tokens, seconds never falling")
        if self.step_s[0][0] < 0 or self.step_s[0][1] < 0:
            raise ValueError(f"step_s must not have negative numbers, as in {self.step_s[0]}")
        for name in ("stall_s", "broadcast_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")

    def seconds(self, tokens: float) -> float:
        """How long a step over `tokens` takes."""
        rows = self.step_s
        segment = next((i for i in range(1, len(rows) - 1) if tokens <= rows[i][0]), len(rows) - 1)
        (low, before), (high, after) = rows[segment - 1 : segment + 1]
        return max(0.0, before + (after - before) * (tokens - low) / (high - low))
