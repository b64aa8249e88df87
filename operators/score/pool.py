"""A pool of verifier processes. A process that hangs, crashes or is killed fails one call and is replaced.

Processes are spawned (never forked from this process, which may have threads) with a clean environment, and receive
JSON (never pickles). A process whose call exceeds its wall-clock limit is killed.
"""

from __future__ import annotations

import selectors
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from infra.workers.process import ProcessEnded, WorkerProcess
from operators.score.worker import MAX_REPLY_BYTES

_START_LIMIT_S = 120.0
_MAX_FAILED_STARTS = 5


class VerifierUnavailable(RuntimeError):
    """Verifier processes do not start, for instance because a reward's module cannot be imported; see the message."""


@dataclass(frozen=True, slots=True)
class VerifierCall:
    """An attempt to judge by reward number `reward`; `attempt` is an AnswerContext as a mapping of JSON values."""

    reward: int
    attempt: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class VerifierResult:
    """The result of a verifier: a finite value, or an error. `values` are those of each conversation of an agent, if
    the verifier tells them apart; `value` is their mean then."""

    value: float | None
    error: str | None
    values: Sequence[float] = ()


def result_of(value: float | Sequence[float]) -> VerifierResult:
    """The result of a verifier that returned `value`: a number, or one for each conversation."""
    return VerifierResult(value, None) if isinstance(value, float) else VerifierResult(fmean(value), None, value)


class VerifierPool:
    """`workers` processes that run the rewards of `setup` (see worker.py). Any thread may use it, one at a time.

    A start that takes longer than `start_limit_s` fails at once if that is set; else starts are tried again.

    The constructor waits until all processes are ready. Raises VerifierUnavailable if one does not start.
    """

    def __init__(
        self, setup: Mapping[str, Any], workers: int, time_limit_s: float, start_limit_s: float | None = None
    ) -> None:
        self._start_limit_s = start_limit_s or _START_LIMIT_S
        self._max_failed_starts = _MAX_FAILED_STARTS if start_limit_s is None else 1
        self._setup, self._time_limit_s = {**setup, "time_limit_s": time_limit_s}, time_limit_s
        self._lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
        self._processes: list[WorkerProcess] = []
        self._failed_starts = 0
        self._calls = 0
        self._results: dict[int, VerifierResult] = {}
        self._closed = False
        # The kernel kills a child when the *thread* that started it ends, so this thread must live as long as the pool.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="verifier-starter")
        try:
            for _ in range(workers):
                self._start()
            while any(not process.ready for process in self._processes):
                self._handle_events()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the verifiers."""
        return [process.pid for process in self._processes]

    def score_all(self, calls: Sequence[VerifierCall]) -> list[VerifierResult]:
        """The results of `calls`, in their order. Raises VerifierUnavailable if ended processes cannot be replaced."""
        with self._lock:
            if self._closed:
                raise VerifierUnavailable("the pool is closed")
            self._results = {}
            waiting = deque(enumerate(calls))
            try:
                while len(self._results) < len(calls):
                    self._assign(waiting)
                    self._handle_events()
            except BaseException:
                self.close()  # processes may still be working on these calls
                raise
            return [self._results[index] for index in range(len(calls))]

    def close(self) -> None:
        """Kill all processes and their children, and wait for them."""
        with self._lock:
            self._closed = True
            for process in self._processes:
                process.kill()
            self._processes.clear()
            self._selector.close()
            self._starter.shutdown()

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _assign(self, waiting: deque[tuple[int, VerifierCall]]) -> None:
        """Assign a call to every idle process."""
        for process in list(self._processes):
            if not (waiting and process.idle):
                continue
            if process.has_ended():  # it ended while idle, so no call fails
                self._replace(process)
                continue
            index, call = waiting.popleft()
            self._calls += 1
            request = {"reward": call.reward, "attempt": call.attempt}
            process.begin(index, self._calls, request, time.monotonic() + self._time_limit_s)
            self._send(process)

    def _handle_events(self) -> None:
        """Wait for the next request, reply or deadline, and handle it."""
        deadlines = [process.deadline for process in self._processes if process.deadline is not None]
        timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        for key, events in self._selector.select(timeout):
            process = key.data
            if process in self._processes:  # it has not failed earlier in this loop
                (self._receive if events & selectors.EVENT_READ else self._send)(process)
        now = time.monotonic()
        for process in list(self._processes):
            if process.deadline is not None and process.deadline <= now:
                limit = self._time_limit_s if process.ready else self._start_limit_s
                self._fail(process, f"the verifier took longer than {limit:g} s")

    def _send(self, process: WorkerProcess) -> None:
        """Send the rest of the request, as far as the pipe has room."""
        try:
            process.send()
        except ProcessEnded as ended:
            self._fail(process, str(ended))
            return
        self._watch_request_pipe(process)

    def _receive(self, process: WorkerProcess) -> None:
        """Receive from the process, and record the result if the reply is complete."""
        try:
            reply = process.receive()
        except ProcessEnded as ended:
            self._fail(process, str(ended))
            return
        if reply is None:
            return
        if process.index is None:
            if "ready" not in reply:
                raise VerifierUnavailable(f"a verifier cannot be loaded: {reply.get('error')}")
            self._failed_starts = 0
            return
        value = reply.get("value")
        self._results[process.index] = (
            result_of(value) if isinstance(value, float | list) else VerifierResult(None, str(reply.get("error")))
        )
        process.index = None
        if reply.get("retire"):
            self._replace(process)

    def _watch_request_pipe(self, process: WorkerProcess) -> None:
        """Select the request pipe for writing only while it is full, which is rare: few requests exceed a pipe."""
        wanted, watched = process.requests, process.watched
        if wanted == watched:
            return
        if watched is not None:
            self._selector.unregister(watched)
        if wanted is not None:
            self._selector.register(wanted, selectors.EVENT_WRITE, process)
        process.watched = wanted

    def _fail(self, process: WorkerProcess, reason: str) -> None:
        """Replace a process that ended, timed out or violated the protocol; its call, if any, gets an error."""
        starting = not process.ready
        index = process.index
        self._discard(process)
        reason = reason or process.ending()
        if index is not None:
            self._results[index] = VerifierResult(None, reason)
        if starting:
            self._failed_starts += 1
            if self._failed_starts >= self._max_failed_starts:
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
        deadline = time.monotonic() + self._start_limit_s
        process: WorkerProcess = self._starter.submit(
            WorkerProcess, "operators.score.worker", self._setup, deadline, MAX_REPLY_BYTES, "verifier"
        ).result()
        self._processes.append(process)
        self._selector.register(process.replies, selectors.EVENT_READ, process)
        self._send(process)
