"""The services of a simulated process: fibers for threads, virtual time, and connections of a simulated network."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from infra.simulation.data_network import DataNetwork, SimulatedListener, SimulatedSocket
from infra.simulation.process import SimulatedProcess
from infra.simulation.scheduler import EventScheduler, Fiber, Signal

T = TypeVar("T")


class SimulatedSystem:
    """An `infra.system.System` for `process` on host `host`; `names` draws secret names."""

    def __init__(self, process: SimulatedProcess, network: DataNetwork, host: str, names: random.Random) -> None:
        self.process, self.network, self.host, self.names = process, network, host, names

    def monotonic(self) -> float:
        """Seconds of the host's clock."""
        return self.process.monotonic()

    def sleep(self, seconds: float, /) -> None:
        """Wait in the present fiber."""
        self.process.sleep(seconds)

    def condition(self) -> SimulatedCondition:
        """A condition between fibers."""
        return SimulatedCondition(self.process.scheduler)

    def event(self) -> SimulatedEvent:
        """An event between fibers."""
        return SimulatedEvent(self.process.scheduler)

    def start_thread(self, name: str, work: Callable[[], None], *, vital: bool = False) -> SimulatedThread:
        """Start a fiber. Every error in it ends the process: none is expected."""
        return SimulatedThread(self.process, name, work)

    def pool(self, threads: int, name: str, begin: Callable[[], None] = lambda: None) -> SimulatedPool:
        """A pool of fibers."""
        return SimulatedPool(self.process, threads, name)

    def listen(self, host: str, port: int, backlog: int) -> SimulatedListener:
        """Listen at a free port of this host."""
        return self.network.listen(self.process, self.host)

    def connect(self, host: str, port: int, timeout_s: float) -> SimulatedSocket:
        """Open a connection. Raises OSError."""
        return self.network.connect(self.process, self.host, f"{host}:{port}", timeout_s)

    def secret_name(self) -> str:
        """32 hexadecimal digits of this process's stream."""
        return f"{self.names.getrandbits(128):032x}"


class SimulatedThread:
    """A fiber that others can wait for."""

    def __init__(self, process: SimulatedProcess, name: str, work: Callable[[], None]) -> None:
        self._scheduler, self._ended, self._alive = process.scheduler, Signal(), True

        def run() -> None:
            try:
                work()
            finally:
                self._alive = False
                self._scheduler.notify(self._ended)

        process.start(name, run, vital=False)

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, at most `timeout` seconds."""
        if self._alive:
            self._scheduler.wait([self._ended], _seconds(timeout))


class SimulatedCondition:
    """As threading.Condition, with a re-entrant lock of one fiber."""

    def __init__(self, scheduler: EventScheduler) -> None:
        self._scheduler = scheduler
        self._owner: Fiber | None = None
        self._depth = 0
        self._freed, self._notified = Signal(), Signal()

    def __enter__(self) -> bool:
        self._take(1)
        return True

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self._free()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a notification; False if there was none within `timeout` seconds."""
        depth = self._depth
        self._free()
        notified = self._scheduler.wait([self._notified], _seconds(timeout))
        self._take(depth)
        return notified

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        """Wait until `predicate` is true, at most `timeout` seconds, and return its last value."""
        deadline = self._scheduler.now + _seconds(timeout)
        while not (found := predicate()) and self._scheduler.now < deadline:
            self.wait(deadline - self._scheduler.now)
        return found

    def notify_all(self) -> None:
        """Wake all that wait."""
        self._scheduler.notify(self._notified)

    def _take(self, depth: int) -> None:
        me = self._scheduler.current
        while self._depth and self._owner is not me:
            self._scheduler.wait([self._freed])
        self._owner, self._depth = me, self._depth + depth

    def _free(self) -> None:
        self._owner, self._depth = None, 0
        self._scheduler.notify(self._freed)


class SimulatedEvent:
    """As threading.Event."""

    def __init__(self, scheduler: EventScheduler) -> None:
        self._scheduler, self._is_set, self._changed = scheduler, False, Signal()

    def set(self) -> None:
        """Wake all that wait, now and later."""
        self._is_set = True
        self._scheduler.notify(self._changed)

    def clear(self) -> None:
        """Let later waits wait."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, at most `timeout` seconds; whether it is."""
        if not self._is_set:
            self._scheduler.wait([self._changed], _seconds(timeout))
        return self._is_set


class SimulatedPool:
    """At most `threads` fibers, which take jobs in their order."""

    def __init__(self, process: SimulatedProcess, threads: int, name: str) -> None:
        self._process, self._threads, self._name = process, threads, name
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._working, self._ended = 0, Signal()

    def submit(self, job: Callable[..., T], /, *arguments: Any) -> Future[T]:
        """Queue a job."""
        future: Future[T] = Future()
        self._jobs.append((future, lambda: job(*arguments)))
        if self._working < self._threads:
            self._working += 1
            SimulatedThread(self._process, self._name, self._work)
        return future

    def wait(self, future: Future[Any], timeout_s: float | None) -> bool:
        """See `infra.system.Pool`."""
        scheduler = self._process.scheduler
        deadline = scheduler.now + _seconds(timeout_s)
        while not future.done() and scheduler.now < deadline:
            scheduler.wait([self._ended], deadline - scheduler.now)
        return future.done()

    def result(self, future: Future[T]) -> T:
        """See `infra.system.Pool`."""
        self.wait(future, None)
        return future.result()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more jobs, and wait for those that run, if `wait`."""
        if cancel_futures:
            while self._jobs:
                self._jobs.popleft()[0].cancel()
        while wait and self._working:
            self._process.scheduler.wait([self._ended])

    def _work(self) -> None:
        try:
            while self._jobs:
                future, job = self._jobs.popleft()
                try:
                    future.set_result(job())
                except Exception as error:  # noqa: BLE001 - it is for the reader of the future
                    future.set_exception(error)
                self._process.scheduler.notify(self._ended)
        finally:
            self._working -= 1
            self._process.scheduler.notify(self._ended)


def _seconds(timeout: float | None) -> float:
    return float("inf") if timeout is None else timeout
