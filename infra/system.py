"""What code with threads and connections needs of its process: time, threads, sockets and secret names.

The product uses `SYSTEM`. A simulation runs the same code in fibers, in virtual time and on a simulated network
(`infra/simulation/system.py`).
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from infra.runners.liveness import LIVENESS

if TYPE_CHECKING:
    from infra.transport.connection import Connection

T = TypeVar("T")


class ConditionVariable(AbstractContextManager[bool], Protocol):
    """As threading.Condition."""

    def wait(self, timeout: float | None = None) -> bool: ...

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T: ...

    def notify_all(self) -> None: ...


class Event(Protocol):
    """As threading.Event."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class Thread(Protocol):
    """A started thread."""

    def join(self, timeout: float | None = None) -> None: ...


class Pool(Protocol):
    """Threads that take one job after the other."""

    def submit(self, job: Callable[..., T], /, *arguments: Any) -> Future[T]: ...

    def wait(self, future: Future[Any], timeout_s: float | None) -> bool:
        """Wait for a submitted job; whether it has ended."""

    def result(self, future: Future[T]) -> T:
        """Wait for a submitted job, and return its result. Raises its error."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None: ...


class Listener(Protocol):
    """A listening socket at `port`."""

    port: int

    def accept(self) -> tuple[Connection, str]:
        """The next connection, and the address of its client. Raises OSError."""

    def close(self) -> None:
        """Stop listening; an `accept` that waits raises OSError."""


class System(Protocol):
    """The services of a process."""

    def monotonic(self) -> float:
        """Seconds of a clock that is never set."""

    def sleep(self, seconds: float, /) -> None: ...

    def condition(self) -> ConditionVariable: ...

    def event(self) -> Event: ...

    def start_thread(self, name: str, work: Callable[[], None], *, vital: bool = False) -> Thread:
        """Start a thread. The process cannot work without a `vital` one: that may return, but not raise."""

    def pool(self, threads: int, name: str, begin: Callable[[], None] = lambda: None) -> Pool:
        """Threads that call `begin` first."""

    def listen(self, host: str, port: int, backlog: int) -> Listener:
        """Listen at `host`:`port` (0: any free port). Raises OSError."""

    def connect(self, host: str, port: int, timeout_s: float) -> Connection:
        """Open a connection. Raises OSError."""

    def secret_name(self) -> str:
        """32 hexadecimal digits that nobody can guess."""


class SocketListener:
    """A listening TCP socket."""

    def __init__(self, host: str, port: int, backlog: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=backlog)
        self.port: int = self._socket.getsockname()[1]

    def accept(self) -> tuple[socket.socket, str]:
        connection, address = self._socket.accept()
        return connection, str(address[0])

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class ThreadPool(ThreadPoolExecutor):
    """A pool of threads of the operating system."""

    def wait(self, future: Future[Any], timeout_s: float | None) -> bool:
        return bool(wait([future], timeout_s).done)

    def result(self, future: Future[T]) -> T:
        return future.result()


class OperatingSystem:
    """The services of the operating system."""

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float, /) -> None:
        time.sleep(seconds)

    def condition(self) -> threading.Condition:
        return threading.Condition()

    def event(self) -> threading.Event:
        return threading.Event()

    def start_thread(self, name: str, work: Callable[[], None], *, vital: bool = False) -> threading.Thread:
        if vital:
            return LIVENESS.start_thread(name, work)
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread

    def pool(self, threads: int, name: str, begin: Callable[[], None] = lambda: None) -> ThreadPool:
        return ThreadPool(threads, name, begin)

    def listen(self, host: str, port: int, backlog: int) -> SocketListener:
        return SocketListener(host, port, backlog)

    def connect(self, host: str, port: int, timeout_s: float) -> socket.socket:
        return socket.create_connection((host, port), timeout=timeout_s)

    def secret_name(self) -> str:
        return secrets.token_hex(16)


SYSTEM: System = OperatingSystem()
