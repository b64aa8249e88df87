"""A pool of verifier processes, each of which may hang, crash or be killed at the cost of one call.

Processes are started afresh (never forked from this one, which may have threads), with a clean environment, and are
sent JSON (never pickles). A call that outlives its wall-clock limit costs its process, which is replaced.
"""

from __future__ import annotations

import selectors
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from infra.workers.process import ProcessEnded, WorkerProcess
from operators.score.worker import MAX_REPLY_BYTES

_START_LIMIT_S = 120.0
_MAX_FAILED_STARTS = 5


class VerifierUnavailable(RuntimeError):
    """Verifier processes do not start: a reward's module cannot be imported, say. The message has its words."""


@dataclass(frozen=True, slots=True)
class VerifierCall:
    """`attempt` (JSON-ready: text, tokens, prompt, task, and the reference as JSON) for reward number `reward`."""

    reward: int
    attempt: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class VerifierResult:
    """What a verifier said: a finite value, or the error that stands in its place."""

    value: float | None
    error: str | None


class VerifierPool:
    """`workers` processes that run the rewards of `setup` (see worker.py). Any thread may use it, one at a time.

    Starting waits until all are ready. Raises VerifierUnavailable if one does not come up.
    """

    def __init__(self, setup: Mapping[str, Any], workers: int, time_limit_s: float) -> None:
        self._setup, self._time_limit_s = {**setup, "time_limit_s": time_limit_s}, time_limit_s
        self._lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
        self._processes: list[WorkerProcess] = []
        self._failed_starts = 0
        self._calls = 0
        self._outcomes: dict[int, VerifierResult] = {}
        self._closed = False
        # The kernel ends a child with the *thread* that started it, so that thread must live as long as the pool.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="verifier-starter")
        try:
            for _ in range(workers):
                self._start()
            while any(not process.ready for process in self._processes):
                self._turn()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the verifiers."""
        return [process.pid for process in self._processes]

    def score_all(self, calls: Sequence[VerifierCall]) -> list[VerifierResult]:
        """One outcome a call, in their order. Raises VerifierUnavailable if lost processes cannot be replaced."""
        with self._lock:
            if self._closed:
                raise VerifierUnavailable("the pool is closed")
            self._outcomes = {}
            waiting = deque(enumerate(calls))
            try:
                while len(self._outcomes) < len(calls):
                    self._assign(waiting)
                    self._turn()
            except BaseException:
                self.close()  # processes may still be at work on these calls
                raise
            return [self._outcomes[index] for index in range(len(calls))]

    def close(self) -> None:
        """End all processes, and whatever they started, and wait for them."""
        with self._lock:
            self._closed = True
            for process in self._processes:
                process.kill()
            self._processes.clear()
            self._selector.close()
            self._starter.shutdown()

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _assign(self, waiting: deque[tuple[int, VerifierCall]]) -> None:
        """Give every idle process a call."""
        for process in list(self._processes):
            if not (waiting and process.idle):
                continue
            if process.has_ended():  # while idle: no call is to blame
                self._replace(process)
                continue
            index, call = waiting.popleft()
            self._calls += 1
            request = {"reward": call.reward, "attempt": call.attempt}
            process.begin(index, self._calls, request, time.monotonic() + self._time_limit_s)
            self._send(process)

    def _turn(self) -> None:
        """Wait for the next thing to happen, and act on it."""
        deadlines = [process.deadline for process in self._processes if process.deadline is not None]
        timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        for key, events in self._selector.select(timeout):
            process = key.data
            if process in self._processes:  # not lost since, in this very loop
                (self._receive if events & selectors.EVENT_READ else self._send)(process)
        now = time.monotonic()
        for process in list(self._processes):
            if process.deadline is not None and process.deadline <= now:
                limit = self._time_limit_s if process.ready else _START_LIMIT_S
                self._lose(process, f"the verifier took longer than {limit:g} s")

    def _send(self, process: WorkerProcess) -> None:
        """Send what is left to send, as far as there is room."""
        try:
            process.send()
        except ProcessEnded as ended:
            self._lose(process, str(ended))
            return
        self._watch_for_room(process)

    def _receive(self, process: WorkerProcess) -> None:
        """Take what has come, and note the reply if that is complete."""
        try:
            reply = process.receive()
        except ProcessEnded as ended:
            self._lose(process, str(ended))
            return
        if reply is None:
            return
        if process.index is None:
            if "ready" not in reply:
                raise VerifierUnavailable(f"a verifier cannot be loaded: {reply.get('error')}")
            self._failed_starts = 0
            return
        value = reply.get("value")
        self._outcomes[process.index] = (
            VerifierResult(value, None) if isinstance(value, float) else VerifierResult(None, str(reply.get("error")))
        )
        process.index = None
        if reply.get("retire"):
            self._replace(process)

    def _watch_for_room(self, process: WorkerProcess) -> None:
        """Wait for the request pipe only while it is full: rarely, since few requests are larger than a pipe."""
        wanted, watched = process.requests, process.watched
        if wanted == watched:
            return
        if watched is not None:
            self._selector.unregister(watched)
        if wanted is not None:
            self._selector.register(wanted, selectors.EVENT_WRITE, process)
        process.watched = wanted

    def _lose(self, process: WorkerProcess, reason: str) -> None:
        """Replace a process that ended, overran or spoke out of turn; its call, if it has one, gets an error."""
        starting = not process.ready
        index = process.index
        self._discard(process)
        reason = reason or process.ending()
        if index is not None:
            self._outcomes[index] = VerifierResult(None, reason)
        if starting:
            self._failed_starts += 1
            if self._failed_starts >= _MAX_FAILED_STARTS:
                raise VerifierUnavailable(f"verifier processes end before they are ready: {reason}")
        self._start()

    def _replace(self, process: WorkerProcess) -> None:
        self._discard(process)
        self._start()

    def _discard(self, process: WorkerProcess) -> None:
        if process.watched is not None:
            self._selector.unregister(process.watched)
        self._selector.unregister(process.replies)
        self._processes.remove(process)
        process.kill()

    def _start(self) -> None:
        deadline = time.monotonic() + _START_LIMIT_S
        process: WorkerProcess = self._starter.submit(
            WorkerProcess, "operators.score.worker", self._setup, deadline, MAX_REPLY_BYTES, "verifier"
        ).result()
        self._processes.append(process)
        self._selector.register(process.replies, selectors.EVENT_READ, process)
        self._send(process)
