"""A token bucket: a link of a given rate, for limits that people set and for measurements in which links are equal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SLICE = 256 << 10
"""Bytes that pass at once through a link with a limit."""


class Link:
    """Lets `bytes_per_s` bytes a second pass, None: all. Any number of threads may use it; it counts what passed."""

    def __init__(
        self,
        bytes_per_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise ValueError(f"a link passes more than {bytes_per_s} bytes a second")
        self.bytes_per_s = bytes_per_s
        self.passed = 0
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._free_at = clock()

    @property
    def slice(self) -> int | None:
        """The most bytes to give it at once; None: as many as there are."""
        return None if self.bytes_per_s is None else SLICE

    def take(self, count: int) -> None:
        """Return once `count` bytes may have passed."""
        with self._lock:
            self.passed += count
            if self.bytes_per_s is None:
                return
            self._free_at = max(self._free_at, self._clock()) + count / self.bytes_per_s
            wait = self._free_at - self._clock()
        if wait > 0:
            self._sleep(wait)
