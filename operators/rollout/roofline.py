"""How long an emulated engine's rounds take.

A decode round reads the weights, does the arithmetic of its batch and reads the KV of all its requests: a part that
depends on the batch size alone, and one that is linear in the tokens of KV. So the time of many rounds over the same
batch, whose KV grows by a token each, is a quadratic, and how many of them fit in a given time is its root.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from operators.rollout.emulation_config import RooflineConfig


@dataclass(frozen=True, slots=True)
class StepPace:
    """Rounds of one batch: the first takes `first_s` and each one `growth_s` longer than the one before.

    Before the first, `prefill_s` goes into new contexts.
    """

    prefill_s: float
    first_s: float
    growth_s: float

    def seconds(self, rounds: int) -> float:
        """Time of the prefill and so many rounds."""
        return self.prefill_s + rounds * self.first_s + self.growth_s * (rounds * (rounds - 1) / 2)

    def rounds(self, seconds: float, most: int) -> int:
        """How many whole rounds fit in `seconds`, at most `most`."""
        left = seconds - self.prefill_s
        if most < 1 or left < self.first_s:
            return 0
        if self.seconds(most) <= seconds:
            return most
        half, linear = self.growth_s / 2, self.first_s - self.growth_s / 2
        # The root in the form that stays exact as the growth goes to zero; rounding may leave it one off.
        found = int(2 * left / (linear + math.sqrt(linear * linear + 4 * half * left)))
        while self.seconds(found + 1) <= seconds:
            found += 1
        while found and self.seconds(found) > seconds:
            found -= 1
        return min(found, most)


class Roofline:
    """Times of rounds in emulated seconds; token counts are of emulated tokens, each `stride` real ones."""

    def __init__(self, config: RooflineConfig, stride: int = 1) -> None:
        reading = config.kv_ns * 1e-9
        self._points = [(b, ms * 1e-3 - reading * config.decode_context * b) for b, ms in config.decode_ms]
        self._stride = stride
        self._per_token = reading * stride * stride  # a round is `stride` real ones, over as many times the KV
        self._prefill = config.prefill_us * 1e-6 * stride
        self.move_s = config.kv_move_us * 1e-6 * stride
        """What the KV of a token takes to come from another machine."""

    def pace(self, batch: int, kv_tokens: int, prefill_tokens: int) -> StepPace:
        """The rounds of `batch` ≥ 1 requests that hold `kv_tokens` of KV, after `prefill_tokens` have been computed."""
        first = self._stride * self._base(batch) + self._per_token * kv_tokens
        return StepPace(self._prefill * prefill_tokens, first, self._per_token * batch)

    def _base(self, batch: int) -> float:
        """Seconds of a real round without its reading of KV: linear between the points, and beyond them."""
        segment = min(max(bisect_left(self._points, (batch,)), 1), len(self._points) - 1)
        (low, before), (high, after) = self._points[segment - 1 : segment + 1]
        return before + (after - before) * (batch - low) / (high - low)
