"""An environment with long-tailed latencies, equal at each repetition of a turn."""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Mapping
from typing import Any

LEAST_S, MEDIAN_S, MOST_S = 0.1, 0.4, 5.0
SPREAD = 1.0
"""Standard deviation of the logarithm of a latency."""
OBSERVED = "<result>12</result>"


class Slow:
    """Replies to each turn after a latency that depends on the prompt's number and the turn."""

    def reset(self, prompt: Mapping[str, Any]) -> str:
        self._number, self._turn = prompt["number"], 0
        return ""

    def step(self, text: str) -> tuple[str, float, bool, Mapping[str, Any]]:
        self._turn += 1
        time.sleep(latency(self._number, self._turn))
        return OBSERVED, 0.0, False, {}


def latency(number: int, turn: int) -> float:
    """Latency in seconds: lognormal, by the inverse normal distribution at a hash of number and turn."""
    digest = hashlib.blake2b(f"{number}/{turn}".encode(), digest_size=8).digest()
    at = (int.from_bytes(digest, "big") + 0.5) / 2**64
    return min(max(MEDIAN_S * math.exp(SPREAD * statistics.NormalDist().inv_cdf(at)), LEAST_S), MOST_S)
