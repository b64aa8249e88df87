"""The time of day of one process, as on a host whose clock is wrong. Its monotonic clock stays right."""

from __future__ import annotations

import time

VARIABLE = "LAMINAR_TEST_CLOCK_S"
"""The environment variable with the seconds by which the clock of a host of roles is ahead."""


def shift_clock(seconds: float) -> None:
    """Set the time of day of this process `seconds` ahead, before the product and the Kafka client are imported."""
    right, right_ns = time.time, time.time_ns
    time.time = lambda: right() + seconds
    time.time_ns = lambda: right_ns() + int(seconds * 10**9)
