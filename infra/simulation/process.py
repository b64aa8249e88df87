"""A simulated operating-system process: fibers with a clock, which die together and can be paused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from infra.simulation.scheduler import EventScheduler, Fiber, Signal

UNIX_S = 1_700_000_000.0
"""The time of day when a simulation begins."""


class SimulatedProcess:
    """A process on a host whose clock differs by `skew_s` seconds. `ended` is called with the error of the first fiber
    that ends, or None; the process has ended then.
    """

    def __init__(
        self, scheduler: EventScheduler, name: str, ended: Callable[[Exception | None], None], skew_s: float = 0.0
    ) -> None:
        self.name, self.scheduler, self.skew_s = name, scheduler, skew_s
        self.alive = True
        self.stopping = False
        """Whether it has been asked to end."""
        self.end: Callable[[Callable[[], None]], None] = lambda end_fibers: end_fibers()
        """Ends the fibers by calling its argument, and frees what a kernel frees then."""
        self._ended = ended
        self._fibers: list[Fiber] = []
        self.paused_until = 0.0
        """It does not run before this time."""

    def start(self, name: str, body: Callable[[], None], *, vital: bool = True) -> None:
        """Start a thread of this process. The process ends with a vital one, and with an error of any other."""
        fiber = self.scheduler.start(f"{self.name} {name}", body, self._fiber_ended if vital else self._worker_ended)
        fiber.paused_until = self.paused_until
        self._fibers = [*(each for each in self._fibers if each.alive), fiber]

    def kill(self) -> None:
        """End the process at once, without a call to `ended`."""
        if self.alive:
            self.alive = False
            self.end(self._kill_fibers)

    def pause(self, seconds: float) -> None:
        """Stop the process for `seconds`; then it continues where it was."""
        self.paused_until = max(self.paused_until, self.scheduler.now + seconds)
        for fiber in self._fibers:
            fiber.paused_until = self.paused_until

    def monotonic(self) -> float:
        """Seconds of this host's clock."""
        return self.scheduler.now + 1000.0 + self.skew_s

    def unix_ms(self) -> int:
        """The time of day by this host's clock, in Unix milliseconds."""
        return int((UNIX_S + self.scheduler.now + self.skew_s) * 1000)

    def sleep(self, seconds: float) -> None:
        """Wait in the present fiber."""
        self.scheduler.sleep(seconds)

    def wait(self, seconds: float) -> bool:
        """Wait in the present fiber; returns whether the process has been asked to end."""
        self.scheduler.sleep(seconds)
        return self.stopping

    def lock(self) -> SimulatedLock:
        """A lock between the fibers of this process."""
        return SimulatedLock(self.scheduler)

    def _kill_fibers(self) -> None:
        for fiber in self._fibers:
            fiber.kill()

    def _worker_ended(self, error: Exception | None) -> None:
        if error is not None:
            self._fiber_ended(error)

    def _fiber_ended(self, error: Exception | None) -> None:
        if self.alive:
            self.kill()
            self._ended(error)


class SimulatedLock:
    """A lock between fibers."""

    def __init__(self, scheduler: EventScheduler) -> None:
        self._scheduler, self._held, self._freed = scheduler, False, Signal()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; False if it was not free within `timeout` seconds."""
        deadline = math.inf if timeout < 0 else self._scheduler.now + timeout
        while self._held:
            if not blocking or self._scheduler.now >= deadline:
                return False
            self._scheduler.wait([self._freed], deadline - self._scheduler.now)
        self._held = True
        return True

    def release(self) -> None:
        """Free the lock."""
        self._held = False
        self._scheduler.notify(self._freed)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: Any) -> None:
        self.release()
