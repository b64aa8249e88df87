"""A deterministic scheduler: events by virtual time, and fibers, which are functions that may wait.

A fiber is a greenlet, so that any code can wait in it. Only one runs at a time, and only the scheduler decides which.
The order of events depends on their times and on the order in which they were planned, and on nothing else.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from typing import Any

from greenlet import getcurrent, greenlet

MAX_EVENTS_A_SECOND = 200_000
"""More events within one second of virtual time are those of a loop in which no time passes."""


class EndlessLoop(Exception):
    """The simulation makes no progress: virtual time stands still, or one step takes all CPU time."""


class FiberKilled(BaseException):
    """Ends a fiber at the place where it waits. Not an Exception: no code of the product may catch it."""


class Signal:
    """Something that fibers wait for."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: dict[Fiber, int] = {}


class Fiber:
    """A function that may wait. `ended` is called with its error, or None, when it ends by itself."""

    def __init__(
        self, scheduler: EventScheduler, name: str, body: Callable[[], None], ended: Callable[[Exception | None], None]
    ) -> None:
        self.name = name
        self.alive = True
        self.paused_until = 0.0
        """The fiber does not run before this time."""
        self._scheduler, self._body, self._ended = scheduler, body, ended
        self._greenlet = greenlet(self._main)
        self._killed = False
        self.token = 0
        """Identifies the present wait."""
        self._value: Any = None

    def wake(self, token: int, value: Any) -> None:
        """Continue the fiber if it still waits with `token`; its `wait` returns `value`."""
        if token != self.token or not self.alive:
            return
        if self.paused_until > self._scheduler.now:
            self._scheduler.at(self.paused_until, lambda: self.wake(token, value))
            return
        self.token += 1
        self._value = value
        self._run()

    def kill(self) -> None:
        """End the fiber where it waits. It may be called from another fiber or from an event."""
        if not self.alive:
            return
        self._killed = True
        if not self._greenlet:  # not started
            self.alive = False
        elif self._scheduler.current is not self:
            self.token += 1
            self._run()

    def suspend(self) -> Any:
        """Wait until `wake` is called with `token`. Only the fiber itself may call it."""
        if not self._killed:
            self._greenlet.parent.switch()
        if self._killed:
            raise FiberKilled(self.name)
        return self._value

    def _run(self) -> None:
        scheduler = self._scheduler
        scheduler.ran = self.name
        before, scheduler.current = scheduler.current, self
        self._greenlet.parent = getcurrent()  # the scheduler, or a fiber that kills this one
        self._greenlet.switch()
        scheduler.current = before

    def _main(self) -> None:
        error: Exception | None = None
        try:
            self._body()
        except FiberKilled:
            self._killed = True
        except Exception as raised:  # noqa: BLE001 - whatever ends a process is for its supervisor
            error = raised
        self.alive = False
        if not self._killed:
            self._scheduler.at(self._scheduler.now, lambda: self._ended(error))


class EventScheduler:
    """Runs events in the order of their times. `now` is the virtual time in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.current: Fiber | None = None
        self.ran = ""
        """The name of the fiber that ran last."""
        self.stopped = False
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self.planned = 0
        """The number of events planned so far."""
        self._fibers: list[Fiber] = []

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Call `call` at `time`."""
        self.planned += 1
        heapq.heappush(self._events, (max(time, self.now), self.planned, call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call `call` in `seconds`."""
        self.at(self.now + seconds, call)

    def start(
        self, name: str, body: Callable[[], None], ended: Callable[[Exception | None], None] = lambda error: None
    ) -> Fiber:
        """Start a fiber now."""
        fiber = Fiber(self, name, body, ended)
        self._fibers = [each for each in self._fibers if each.alive]
        self._fibers.append(fiber)
        token = fiber.token
        self.at(self.now, lambda: fiber.wake(token, None))
        return fiber

    def run(self, until: float = math.inf) -> None:
        """Run all events up to time `until`, or until `stop`. Raises EndlessLoop if time stands still."""
        second, events = self.now, 0
        while self._events and not self.stopped and self._events[0][0] <= until:
            self.now, _, call = heapq.heappop(self._events)
            events += 1
            if self.now >= second + 1.0:
                second, events = self.now, 0
            elif events > MAX_EVENTS_A_SECOND:
                raise EndlessLoop(f"{events} events within a second at {self.now:.3f} s; the fiber {self.ran} ran last")
            call()
        if not self.stopped and until < math.inf:
            self.now = max(self.now, until)

    def stop(self) -> None:
        """End `run` after the present event."""
        self.stopped = True

    def close(self) -> None:
        """Kill all fibers and forget all events."""
        for fiber in self._fibers:
            fiber.kill()
        self._fibers, self._events = [], []

    def sleep(self, seconds: float) -> None:
        """Let the present fiber wait for `seconds`."""
        fiber = self._present()
        token = fiber.token
        self.at(self.now + seconds, lambda: fiber.wake(token, None))
        fiber.suspend()

    def wait(self, signals: Iterable[Signal], seconds: float = math.inf) -> bool:
        """Let the present fiber wait for any of `signals`, at most `seconds`; False if none came."""
        fiber = self._present()
        token = fiber.token
        for signal in signals:
            signal.waiting[fiber] = token
        if seconds < math.inf:
            self.at(self.now + seconds, lambda: fiber.wake(token, False))
        return bool(fiber.suspend())

    def notify(self, signal: Signal, delay: float = 0.0) -> None:
        """Wake the fibers that wait for `signal`, in `delay` seconds."""
        waiting, signal.waiting = signal.waiting, {}
        for fiber, token in waiting.items():
            if token == fiber.token:
                self.at(self.now + delay, lambda fiber=fiber, token=token: fiber.wake(token, True))  # type: ignore[misc]

    def _present(self) -> Fiber:
        assert self.current is not None, "only a fiber can wait"
        return self.current
