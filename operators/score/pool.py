"""A pool of verifier processes. A process that hangs, crashes or is killed fails one call and is replaced.

Processes are spawned (never forked from this process, which may have threads) with a clean environment, and receive
JSON (never pickles). A process whose call exceeds its wall-clock limit is killed.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from infra.workers.pool import WorkerPool, WorkersUnavailable
from infra.workers.process import ProcessEnded, WorkerProcess
from operators.score.worker import MAX_REPLY_BYTES

_START_LIMIT_S = 120.0
_MAX_FAILED_STARTS = 5
_SHOWN = 80


class VerifierUnavailable(WorkersUnavailable):
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
    if isinstance(value, float):
        return VerifierResult(value, None)
    try:
        return VerifierResult(fmean(value), None, value)
    except (OverflowError, TypeError, ValueError) as error:  # the process of a user's function may reply anything
        return VerifierResult(None, f"returned {str(value)[:_SHOWN]}: {error}")


class VerifierPool(WorkerPool):
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
        self._one_caller = threading.Lock()
        self._waiting: deque[tuple[int, VerifierCall]] = deque()
        self._results: dict[int, VerifierResult] = {}
        self._wanted = 0
        self._failed_starts = 0
        super().__init__("verifier", workers)
        self._wait_for(lambda: len(self._processes) == workers)

    def score_all(self, calls: Sequence[VerifierCall]) -> list[VerifierResult]:
        """The results of `calls`, in their order. Raises VerifierUnavailable if ended processes cannot be replaced."""
        with self._one_caller:
            with self._change:
                self._results, self._wanted = {}, len(calls)
                self._waiting.extend(enumerate(calls))
                self._change.notify_all()
            self._wait_for(lambda: len(self._results) == self._wanted)
            if self._closed:
                raise VerifierUnavailable("the pool is closed")
            return [self._results[index] for index in range(len(calls))]

    def _work(self, worker: int) -> None:
        for number in itertools.count(1):
            process = self._processes.get(worker) or self._start(worker)
            with self._change:
                self._change.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                index, call = self._waiting.popleft()
            if process.has_ended():  # it ended while idle, so no call fails
                self._drop(worker)
                process = self._start(worker)
            result = self._judge(worker, process, number, call)
            with self._change:
                self._results[index] = result
                if len(self._results) == self._wanted:
                    self._change.notify_all()

    def _judge(self, worker: int, process: WorkerProcess, number: int, call: VerifierCall) -> VerifierResult:
        """The result of `call`, the worker's call `number`; a process that fails or retires is dropped."""
        process.begin(number, {"reward": call.reward, "attempt": call.attempt})
        try:
            reply = process.reply(self._time_limit_s, self._closing)
        except TimeoutError:
            self._drop(worker)
            return VerifierResult(None, f"the verifier took longer than {self._time_limit_s:g} s")
        except ProcessEnded as ended:
            self._drop(worker)
            return VerifierResult(None, str(ended))
        if reply.get("retire"):
            self._drop(worker)
        value = reply.get("value")
        return result_of(value) if isinstance(value, float | list) else VerifierResult(None, str(reply.get("error")))

    def _start(self, worker: int) -> WorkerProcess:
        """Start the worker's process. Raises VerifierUnavailable, PoolClosed."""
        while True:
            process = WorkerProcess("operators.score.worker", self._setup, MAX_REPLY_BYTES, "verifier")
            try:
                reply = self._open(worker, process, self._start_limit_s)
            except TimeoutError:
                reason = f"the verifier took longer than {self._start_limit_s:g} s"
            except ProcessEnded as ended:
                reason = str(ended)
            else:
                if "ready" not in reply:
                    raise VerifierUnavailable(f"a verifier cannot be loaded: {reply.get('error')}")
                self._failed_starts = 0
                return process
            self._failed_starts += 1
            if self._failed_starts >= self._max_failed_starts:
                raise VerifierUnavailable(f"verifier processes end before they are ready: {reason}")
