"""Worker processes that play the episodes of one environment beside the engine, whatever happens to them.

Each process belongs to a thread, which waits for it: for a step that takes long nobody else does. A process that
overruns its time is killed; one that dies is replaced and the episode played again there, once.
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
_BYTES_PER_CHAR = 12  # the longest escape in JSON, a pair of surrogates


class EnvironmentUnavailable(RuntimeError):
    """The environment cannot be had at all: its module cannot be imported, say. The message has its words."""


class EnvironmentFailed(RuntimeError):
    """An episode came to nothing; the message says why."""


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
    """The processes of `spec`, the first of which is started at once. Any thread may use it.

    Raises EnvironmentUnavailable if that does not come up.
    """

    def __init__(self, spec: EnvironmentSpec) -> None:
        self.spec = spec
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
        self._held: dict[str, int] = {}
        """Which thread's process has an episode."""
        self._change = threading.Condition()
        self._closed = False
        self._closing, self._close = os.pipe()
        started: Future[None] = Future()
        self._threads = [
            threading.Thread(
                target=self._work,
                args=(me, started if not me else None),
                name=f"{spec.resolved_name}-{me}",
                daemon=True,
            )
            for me in range(spec.workers)
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
        """The episode named `episode` by its turns `texts` so far; `last`: none will follow.

        The future has EnvironmentFailed for whatever goes wrong, and may be cancelled.
        """
        job = _EpisodeJob(episode, prompt, tuple(texts), last)
        with self._change:
            self._jobs.append(job)
            self._change.notify_all()
        return job.done

    def close(self) -> None:
        """End all processes, and whatever they started, and wait for them; what is under way fails."""
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

    # -- in a thread --------------------------------------------------------------------------------------------------

    def _work(self, me: int, started: Future[None] | None) -> None:
        process: WorkerProcess | None = None
        try:
            if started is not None:
                try:
                    process = self._start()
                    started.set_result(None)
                except (EnvironmentUnavailable, TimeoutError, ProcessEnded) as error:
                    started.set_exception(
                        EnvironmentUnavailable(str(error) or f"{self.spec.resolved_name} does not start")
                    )
                    return
            calls = 0
            while (job := self._next(me)) is not None:
                if not job.done.set_running_or_notify_cancel():
                    continue
                calls += 1
                try:
                    process, played = self._play(process, job, calls)
                except _Closed:
                    job.done.set_exception(EnvironmentFailed("the environment was closed"))
                    return
                if isinstance(played, EpisodeState):
                    job.done.set_result(played)
                else:
                    job.done.set_exception(EnvironmentFailed(played))
                if process is None:
                    self._forget(me)
        except _Closed:
            return
        finally:
            if process is not None:
                process.kill()

    def _next(self, me: int) -> _EpisodeJob | None:
        """The next job for this thread: of an episode that its process has, else of one that none has, else any."""
        with self._change:
            while not (self._jobs or self._closed):
                self._change.wait()
            if self._closed:
                return None
            job = min(self._jobs, key=lambda job: {me: 0, None: 1}.get(self._held.get(job.episode), 2))
            self._jobs.remove(job)
            self._held.pop(job.episode, None)
            if not job.last:
                self._held[job.episode] = me
            return job

    def _forget(self, me: int) -> None:
        with self._change:
            self._held = {name: thread for name, thread in self._held.items() if thread != me}

    def _play(
        self, process: WorkerProcess | None, job: _EpisodeJob, call: int
    ) -> tuple[WorkerProcess | None, EpisodeState | str]:
        """What came of `job`, or why nothing did, and the process that is left."""
        request = {"episode": job.episode, "prompt": dict(job.prompt), "texts": job.texts, "last": job.last}
        ending = ""
        for _ in range(2):
            try:
                process = process or self._start()
            except (EnvironmentUnavailable, TimeoutError, ProcessEnded) as error:
                return None, f"the environment does not start: {error}"
            process.begin(0, call, request, 0.0)
            try:
                while "step" in (reply := self._wait(process, time.monotonic() + self.spec.seconds)):
                    pass  # it is being played from its beginning: every step has its own time
            except TimeoutError:
                process.kill()
                return None, f"the environment took longer than {self.spec.seconds:g} s a step"
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
                played = EpisodeState(list(reply["observations"]), list(reply["rewards"]), bool(reply["done"]))
            except KeyError:
                return process, f"the environment failed: {reply.get('error')}"
            return process, played
        return None, ending

    def _start(self) -> WorkerProcess:
        """A process that is ready. Raises EnvironmentUnavailable, TimeoutError, ProcessEnded."""
        process = WorkerProcess(
            "operators.rollout.environments.worker", self._setup, 0.0, self._reply_bytes, "environment"
        )
        try:
            reply = self._wait(process, time.monotonic() + _START_S)
            if "ready" not in reply:
                raise EnvironmentUnavailable(f"{self.spec.resolved_name} cannot be loaded: {reply.get('error')}")
        except BaseException:
            process.kill()
            raise
        self.stop = tuple(reply["stop"])
        return process

    def _wait(self, process: WorkerProcess, deadline: float) -> Mapping[str, Any]:
        """The process's next reply. Raises TimeoutError, ProcessEnded, _Closed."""
        while True:
            process.send()
            if (reply := process.receive()) is not None:
                return reply
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("it took too long")
            waits = select.poll()
            waits.register(self._closing, select.POLLIN)
            waits.register(process.replies, select.POLLIN)
            if process.requests is not None:
                waits.register(process.requests, select.POLLOUT)
            waits.poll(left * 1000)
            if self._closed:
                raise _Closed
