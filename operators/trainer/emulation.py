"""Configuration of the emulated trainer: how long its steps take."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import pairwise

from infra.setting_types import CheckedSettings, NonNegative


@dataclass(frozen=True)
class TrainerEmulation(CheckedSettings):
    """Timing of the emulated trainer. Raises ValueError naming the invalid field.

    The default is a 32B model on 16 H800: 8 × 32.8e9 operations per token (six for the update, two for the reference)
    at 40 % of 16 × 989 TFLOPS take 41 µs, in addition to the fixed time of a step. Stall and broadcast times are those
    of the Laminar paper's relay tier (arXiv 2510.12633) for 32B on four machines.
    """

    step_s: tuple[tuple[NonNegative, NonNegative], ...] = ((0.0, 5.0), (1_000_000.0, 46.0))
    """Pairs of real tokens per global batch (prompts included) and seconds per step; linear between and beyond."""
    stall_s: NonNegative = 0.64
    """Seconds that the trainer stalls to hand over its weights."""
    broadcast_s: NonNegative = 0.42
    """Seconds from the end of the stall until every machine has the complete version."""
    deviation: NonNegative = 0.0
    """Standard deviation of the time of a step over its mean, as by other work of the machine: lognormal, the same in
    every run. 0: each step takes exactly the time of its tokens."""

    def _check(self) -> None:
        if len(self.step_s) < 2 or any(b[0] <= a[0] or b[1] < a[1] for a, b in pairwise(self.step_s)):
            raise ValueError(
                f"step_s must be two or more rows of rising tokens and non-falling seconds, not {self.step_s}"
            )

    def factor(self, step: int) -> float:
        """How many times as long as the mean step `step` takes."""
        if not self.deviation:
            return 1.0
        variance = math.log1p(self.deviation**2)
        return random.Random(step).lognormvariate(-variance / 2, math.sqrt(variance))

    def seconds(self, tokens: float) -> float:
        """Mean seconds of a step over `tokens` tokens."""
        rows = self.step_s
        segment = next((i for i in range(1, len(rows) - 1) if tokens <= rows[i][0]), len(rows) - 1)
        (low, before), (high, after) = rows[segment - 1 : segment + 1]
        return max(0.0, before + (after - before) * (tokens - low) / (high - low))
