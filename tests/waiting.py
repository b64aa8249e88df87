"""Waits of tests for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object]) -> None:
    """Return once `condition` is true; fail after 60 s."""
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.005)
