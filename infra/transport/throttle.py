"""A token bucket: a link with a rate limit, set by users or by measurements that need equal links.

Waiting transfers pass in the order of their turns instead of sharing the rate: the steps of a schedule complete earlier
one after the other.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable

SLICE = 256 << 10
"""Most bytes that a limited link passes at a time."""
SLICE_S = 0.25
"""Seconds that a slice takes at most: a peer that sends nothing for seconds is abandoned."""
BURST_S = 0.05
"""Seconds of unused rate that are saved, so that a transfer that starts slightly late loses nothing."""


class Link:
    """Passes `bytes_per_s` bytes per second (None: unlimited) and counts them. Safe to use from several threads."""

    def __init__(
        self,
        bytes_per_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise ValueError(f"the rate of a link must be positive, not {bytes_per_s} bytes per second")
        self.bytes_per_s = bytes_per_s
        self.bytes_passed = 0
        self._clock, self._sleep = clock, sleep
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, int]] = []
        self._busy = False
        self._free_at = clock()

    @property
    def max_slice(self) -> int | None:
        """The maximum of bytes for one `acquire`; None: no maximum."""
        return None if self.bytes_per_s is None else int(min(SLICE, max(1.0, self.bytes_per_s * SLICE_S)))

    def acquire(self, count: int, turn: int = 0) -> None:
        """Block until `count` bytes may pass; waiters with a lower `turn` pass first."""
        with self._changed:
            self.bytes_passed += count
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
