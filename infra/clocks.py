"""The time of day of a real process. Steps take their clocks as arguments, so that a simulated process has others."""

from __future__ import annotations

import time


def wall_ms() -> int:
    """The time of day in Unix milliseconds."""
    return time.time_ns() // 10**6
