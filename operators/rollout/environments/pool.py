"""A pool of worker processes that run the episodes of one environment beside the engine.

Each process has a thread that waits for it, so a slow step delays no other episode. A process that exceeds its time
limit is killed; one that dies is replaced, and its episode is replayed there once.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from infra.workers.process import ProcessEnded, WorkerProcess
from operators.rollout.environments.config import EnvironmentSpec
from operators.rollout.environments.contract import EpisodeState

_START_S = 120.0
_RAISED = "the environment failed: "
_BYTES_PER_CHAR = 12  # the longest JSON escape: a surrogate pair


class EnvironmentUnavailable(RuntimeError):
    """The environment cannot be started, for example because its module cannot be imported."""


class EnvironmentFailed(RuntimeError):
    """An episode failed; the message has the reason."""

    @property
    def reason(self) -> str:
        """The message without the words that the environment failed."""
        return str(self).removeprefix(_RAISED)


class _Closed(Exception):
    pass


@dataclass(eq=False)
class _EpisodeJob:
    episode: str
    prompt: Mapping[str, Any]
    texts: tuple[str, ...]
    last: bool
    done: Future[EpisodeState] = field(default_factory=Future)


class EnvironmentPool:
    """The processes of `spec`; the first is started at once, the others on demand. Thread-safe.

    Raises EnvironmentUnavailable if the first process does not start within `start_limit_s`.
    """

    def __init__(self, spec: EnvironmentSpec, start_limit_s: float = _START_S) -> None:
        self.spec, self._start_limit_s = spec, start_limit_s
        self.stop: tuple[str, ...] = ()
        """Strings that end a turn."""
        self._setup = {
            "target": spec.target,
            "options": dict(spec.options),
            "memory_mb": spec.memory_mb,
            "seconds": spec.seconds,
            "max_observation_chars": spec.max_observation_chars,
        }
        self._reply_bytes = 65_536 + (spec.turns + 1) * (spec.max_observation_chars * _BYTES_PER_CHAR + 64)
        self._jobs: deque[_EpisodeJob] = deque()
        self._worker_of: dict[str, int] = {}
        """By episode: the worker whose process has it."""
        self._change = threading.Condition()
        self._closed = False
        self._closing, self._close = os.pipe()
        started: Future[None] = Future()
        self._threads = [
            threading.Thread(
                target=self._work,
                args=(worker, started if not worker else None),
                name=f"{spec.resolved_name}-{worker}",
                daemon=True,
            )
            for worker in range(spec.workers)
        ]
        for thread in self._threads:
            thread.start()
        try:
            started.result()
        except BaseException:
            self.close()
            raise

    def play(
        self, episode: str, prompt: Mapping[str, Any], texts: Sequence[str], *, last: bool
    ) -> Future[EpisodeState]:
        """Run episode `episode` up to its turns `texts`; `last`: no turn will follow.

        The future raises EnvironmentFailed for every failure, and may be cancelled.
        """
        job = _EpisodeJob(episode, prompt, tuple(texts), last)
        with self._change:
            self._jobs.append(job)
            self._change.notify_all()
        return job.done

    def close(self) -> None:
        """Kill all processes and their children, and wait for them; running episodes fail."""
        with self._change:
            if self._closed:
                return
            self._closed = True
            self._change.notify_all()
        os.close(self._close)
        for thread in self._threads:
            thread.join()
        os.close(self._closing)
        for job in self._jobs:
            job.done.cancel()

    # -- in the worker threads -----------------------------------------------------------------------------------------

    def _work(self, worker: int, started: Future[None] | None) -> None:
        process: WorkerProcess | None = None
        try:
            if started is not None:
                try:
                    process = self._start()
                    started.set_result(None)
                except EnvironmentUnavailable as error:
                    started.set_exception(error)
                    return
            calls = 0
            while (job := self._next(worker)) is not None:
                if not job.done.set_running_or_notify_cancel():
                    continue
                calls += 1
                try:
                    process, state = self._play(process, job, calls)
                except _Closed:
                    job.done.set_exception(EnvironmentFailed("the environment was closed"))
                    return
                if isinstance(state, EpisodeState):
                    job.done.set_result(state)
                else:
                    job.done.set_exception(EnvironmentFailed(state))
                if process is None:
                    self._release_episodes(worker)
        except _Closed:
            return
        finally:
            if process is not None:
                process.kill()

    def _next(self, worker: int) -> _EpisodeJob | None:
        """The next job for this worker: of an episode that its process has, else that no process has, else any."""
        with self._change:
            while not (self._jobs or self._closed):
                self._change.wait()
            if self._closed:
                return None
            job = min(self._jobs, key=lambda job: {worker: 0, None: 1}.get(self._worker_of.get(job.episode), 2))
            self._jobs.remove(job)
            self._worker_of.pop(job.episode, None)
            if not job.last:
                self._worker_of[job.episode] = worker
            return job

    def _release_episodes(self, worker: int) -> None:
        with self._change:
            self._worker_of = {name: owner for name, owner in self._worker_of.items() if owner != worker}

    def _play(
        self, process: WorkerProcess | None, job: _EpisodeJob, call: int
    ) -> tuple[WorkerProcess | None, EpisodeState | str]:
        """Run `job`; returns the process if it still runs, and the episode's state or the reason of the failure."""
        request = {"episode": job.episode, "prompt": dict(job.prompt), "texts": job.texts, "last": job.last}
        ending = ""
        for _ in range(2):
            try:
                process = process or self._start()
            except EnvironmentUnavailable as error:
                return None, str(error)
            process.begin(0, call, request, 0.0)
            try:
                while "step" in (reply := self._wait(process, time.monotonic() + self.spec.seconds)):
                    pass  # the episode is being replayed: every step has its own time limit
            except TimeoutError:
                process.kill()
                return None, f"a step of the environment took longer than {self.spec.seconds:g} s"
            except ProcessEnded as ended:
                process.kill()
                ending, process = str(ended) or process.ending(), None
                continue
            except _Closed:
                process.kill()
                raise
            process.index = None
            if reply.get("retire"):
                process.kill()
                process = None
            try:
                state = EpisodeState(list(reply["observations"]), list(reply["rewards"]), bool(reply["done"]))
            except KeyError:
                return process, f"{_RAISED}{reply.get('error')}"
            return process, state
        return None, ending

    def _start(self) -> WorkerProcess:
        """Start a process and wait until it is ready. Raises EnvironmentUnavailable, _Closed."""
        process = WorkerProcess(
            "operators.rollout.environments.worker", self._setup, 0.0, self._reply_bytes, "environment"
        )
        try:
            reply = self._wait(process, time.monotonic() + self._start_limit_s)
        except BaseException as error:
            process.kill()
            if isinstance(error, TimeoutError):
                reason = f"does not start within {self._start_limit_s:g} s"
            elif isinstance(error, ProcessEnded):
                reason = f"does not start: {str(error) or process.ending()}"
            else:
                raise
            raise EnvironmentUnavailable(f"{self.spec.resolved_name} {reason}") from None
        if "ready" not in reply:
            process.kill()
            raise EnvironmentUnavailable(f"{self.spec.resolved_name} cannot be loaded: {reply.get('error')}")
        self.stop = tuple(reply["stop"])
        return process

    def _wait(self, process: WorkerProcess, deadline: float) -> Mapping[str, Any]:
        """Wait for the process's next reply. Raises TimeoutError, ProcessEnded, _Closed."""
        while True:
            process.send()
            if (reply := process.receive()) is not None:
                return reply
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("no reply within the time limit")
            poller = select.poll()
            poller.register(self._closing, select.POLLIN)
            poller.register(process.replies, select.POLLIN)
            if process.requests is not None:
                poller.register(process.requests, select.POLLOUT)
            poller.poll(left * 1000)
            if self._closed:
                raise _Closed
