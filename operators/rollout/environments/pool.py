"""A pool of worker processes that run the episodes of one environment beside the engine.

Each process has a thread that waits for it, so a slow step delays no other episode. A process that exceeds its time
limit is killed; one that dies is replaced, and its episode is replayed there once.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from infra.workers.pool import WorkerPool, WorkersUnavailable
from infra.workers.process import PoolClosed, ProcessEnded, WorkerProcess
from operators.rollout.environments.config import EnvironmentSpec
from operators.rollout.environments.contract import EpisodeState
from operators.rollout.environments.worker import MAX_LIVE_EPISODES

_START_S = 120.0
_RAISED = "the environment failed: "
_BYTES_PER_CHAR = 12  # the longest JSON escape: a surrogate pair


class EnvironmentUnavailable(WorkersUnavailable):
    """The environment cannot be started, for example because its module cannot be imported."""


class EnvironmentFailed(RuntimeError):
    """An episode failed; the message has the reason."""

    @property
    def reason(self) -> str:
        """The message without the words that the environment failed."""
        return str(self).removeprefix(_RAISED)


@dataclass(eq=False)
class _EpisodeJob:
    episode: str
    prompt: Mapping[str, Any]
    texts: tuple[str, ...]
    last: bool
    done: Future[EpisodeState] = field(default_factory=Future)


class EnvironmentPool(WorkerPool):
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
        """By episode that goes on: the worker whose process has it; the newest last, as many as the processes keep."""
        super().__init__(spec.resolved_name, spec.workers)
        self._wait_for(lambda: 0 in self._processes)

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
        super().close()
        for job in self._jobs:
            job.done.cancel()

    # -- in the worker threads -----------------------------------------------------------------------------------------

    def _work(self, worker: int) -> None:
        if worker == 0:
            self._start(worker)
        for call in itertools.count(1):
            job = self._next(worker)
            if job is None:
                return
            if not job.done.set_running_or_notify_cancel():
                continue
            try:
                job.done.set_result(self._play(worker, job, call))
            except EnvironmentFailed as error:
                job.done.set_exception(error)
            except PoolClosed:
                job.done.set_exception(EnvironmentFailed("the environment was closed"))
                return
            except Exception as error:  # noqa: BLE001 - else the episode waits for ever
                self._drop(worker)
                job.done.set_exception(EnvironmentFailed(f"its worker process failed: {error!r}"))

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
            return job

    def _drop(self, worker: int) -> None:
        super()._drop(worker)
        with self._change:
            self._worker_of = {name: owner for name, owner in self._worker_of.items() if owner != worker}

    def _play(self, worker: int, job: _EpisodeJob, call: int) -> EpisodeState:
        """Run `job` and return the episode's state. Raises EnvironmentFailed, PoolClosed."""
        request = {"episode": job.episode, "prompt": dict(job.prompt), "texts": job.texts, "last": job.last}
        ending = ""
        for _ in range(2):
            try:
                process = self._processes.get(worker) or self._start(worker)
                process.begin(call, request)
                while "step" in (reply := process.reply(self.spec.seconds, self._closing)):
                    pass  # the episode is being replayed: every step has its own time limit
            except EnvironmentUnavailable as error:
                raise EnvironmentFailed(str(error)) from error
            except TimeoutError:
                self._drop(worker)
                raise EnvironmentFailed(f"a step of the environment took longer than {self.spec.seconds:g} s") from None
            except ProcessEnded as ended:
                self._drop(worker)
                ending = str(ended)
                continue
            if reply.get("retire"):
                self._drop(worker)
            if "error" in reply:
                raise EnvironmentFailed(f"{_RAISED}{reply['error']}")
            state = EpisodeState(list(reply["observations"]), list(reply["rewards"]), bool(reply["done"]))
            if not (state.done or job.last or reply.get("retire")):
                self._keep(worker, job.episode)
            return state
        raise EnvironmentFailed(ending)

    def _keep(self, worker: int, episode: str) -> None:
        with self._change:
            self._worker_of[episode] = worker
            if len(self._worker_of) > MAX_LIVE_EPISODES * self.spec.workers:
                del self._worker_of[next(iter(self._worker_of))]

    def _start(self, worker: int) -> WorkerProcess:
        """Start the worker's process. Raises EnvironmentUnavailable, PoolClosed."""
        process = WorkerProcess("operators.rollout.environments.worker", self._setup, self._reply_bytes, "environment")
        try:
            reply = self._open(worker, process, self._start_limit_s)
        except TimeoutError:
            reason = f"does not start within {self._start_limit_s:g} s"
        except ProcessEnded as ended:
            reason = f"does not start: {ended}"
        else:
            if "ready" in reply:
                self.stop = tuple(reply["stop"])
                return process
            reason = f"cannot be loaded: {reply.get('error')}"
        raise EnvironmentUnavailable(f"{self.spec.resolved_name} {reason}")
