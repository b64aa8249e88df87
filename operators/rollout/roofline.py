"""The duration of an emulated engine's rounds, by a roofline model.

A decode round reads the weights, does the arithmetic of its batch and reads the KV of all requests: one part depends on
the batch size alone, the other is linear in the KV tokens. So the time of n rounds over the same batch, whose KV grows
by a token per request and round, is quadratic in n, and the rounds that fit in a given time are its root.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from operators.rollout.draft_lengths import LENGTHS, MOST_ROWS, expected_tokens
from operators.rollout.emulation_config import RooflineConfig, SpeculationEmulation


@dataclass(frozen=True, slots=True)
class StepPace:
    """Rounds of one batch: the first takes `first_s`, and each further one `growth_s` more than the one before.

    The prefill before the first takes `prefill_s`.
    """

    prefill_s: float
    first_s: float
    growth_s: float

    def seconds(self, rounds: int) -> float:
        """Seconds of the prefill and `rounds` rounds."""
        return self.prefill_s + rounds * self.first_s + self.growth_s * (rounds * (rounds - 1) / 2)

    def rounds(self, seconds: float, most: int) -> int:
        """The number of whole rounds that fit in `seconds`, at most `most`."""
        left = seconds - self.prefill_s
        if most < 1 or left < self.first_s:
            return 0
        if self.seconds(most) <= seconds:
            return most
        half, linear = self.growth_s / 2, self.first_s - self.growth_s / 2
        # This form of the root stays exact as the growth goes to zero; rounding may leave it one off.
        found = int(2 * left / (linear + math.sqrt(linear * linear + 4 * half * left)))
        while self.seconds(found + 1) <= seconds:
            found += 1
        while found and self.seconds(found) > seconds:
            found -= 1
        return min(found, most)


class Roofline:
    """Round times in emulated seconds; token counts are of emulated tokens, each of `stride` real ones.

    With `speculation` a round is the mean time of a token: that of a verification of the drafts that pay most, divided
    by its expected tokens. It reads the KV once, and computes each draft token as a further request.
    """

    def __init__(
        self, config: RooflineConfig, stride: int = 1, speculation: SpeculationEmulation | None = None
    ) -> None:
        reading = config.kv_ns * 1e-9
        self._points = [(b, ms * 1e-3 - reading * config.decode_context * b) for b, ms in config.decode_ms]
        self._stride = stride
        self._per_token = reading * stride * stride  # a round is `stride` real rounds, each over `stride` times the KV
        self._drafts: list[tuple[int, float]] = []
        if speculation is not None:
            gained = 1 + speculation.draft_share * (expected_tokens(np.array(speculation.acceptance), LENGTHS) - 1)
            self._drafts = list(zip(LENGTHS.tolist(), gained.tolist(), strict=True))
        self._prefill = config.prefill_us * 1e-6 * stride
        self.move_s = config.kv_move_us * 1e-6 * stride
        """Emulated seconds to transfer the KV of one token from another machine."""

    def pace(self, batch: int, kv_tokens: int, prefill_tokens: int) -> StepPace:
        """The rounds of `batch` ≥ 1 requests that hold `kv_tokens` of KV, after a prefill of `prefill_tokens`."""
        reading = self._per_token * kv_tokens
        first, gained = self._stride * self._base(batch) + reading, 1.0
        for draft, tokens in self._drafts if batch <= MOST_ROWS else ():
            verification = self._stride * self._base(batch * (1 + draft)) + reading
            if verification / tokens < first / gained:
                first, gained = verification, tokens
        return StepPace(self._prefill * prefill_tokens, first / gained, self._per_token * batch / gained)

    def _base(self, batch: int) -> float:
        """Seconds of a real round without its KV reads: linear between the points, and beyond them."""
        segment = min(max(bisect_left(self._points, (batch,)), 1), len(self._points) - 1)
        (low, before), (high, after) = self._points[segment - 1 : segment + 1]
        return before + (after - before) * (batch - low) / (high - low)
