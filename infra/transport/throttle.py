"""A token bucket: a link of a given rate, for limits that people set and for measurements in which links are equal.

Who waits for it goes by turn, not all at a share of the rate: a schedule's steps are over sooner one after the other.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable

SLICE = 256 << 10
"""Bytes that pass at once through a link with a limit."""
BURST_S = 0.05
"""How much of the rate is saved up, so that whoever comes a little late loses nothing."""


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
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, int]] = []
        self._busy = False
        self._free_at = clock()

    @property
    def slice(self) -> int | None:
        """The most bytes to give it at once; None: as many as there are."""
        return None if self.bytes_per_s is None else SLICE

    def take(self, count: int, turn: int = 0) -> None:
        """Return once `count` bytes may have passed; those of a lower `turn` pass first."""
        with self._changed:
            self.passed += count
            if self.bytes_per_s is None:
                return
            mine = turn, next(self._numbers)
            heapq.heappush(self._waiting, mine)
            self._changed.wait_for(lambda: not self._busy and self._waiting[0] == mine)
            heapq.heappop(self._waiting)
            now = self._clock()
            self._free_at = max(self._free_at, now - BURST_S) + count / self.bytes_per_s
            wait = self._free_at - now
            self._busy = True
        if wait > 0:
            self._sleep(wait)
        with self._changed:
            self._busy = False
            self._changed.notify_all()
