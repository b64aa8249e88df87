"""WorkerPool: threads that each run one worker process at a time, so that a call that takes long delays no other."""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from infra.closing import ClosedAtExit
from infra.workers.process import PoolClosed, WorkerProcess


class WorkersUnavailable(RuntimeError):
    """Worker processes do not start, for instance because a user's module cannot be imported; see the message."""


class WorkerPool(ClosedAtExit):
    """`workers` threads named after `name`; each calls `_work`, which starts processes and calls them.

    The kernel kills a process when the thread that started it ends, so a process is of one worker only. Subclasses set
    their attributes before they call this constructor, which starts the threads.
    """

    def __init__(self, name: str, workers: int) -> None:
        self._change = threading.Condition()
        self._closed = False
        self._closing, self._close = os.pipe()
        self._failure: WorkersUnavailable | None = None
        self._processes: dict[int, WorkerProcess] = {}
        """By worker: the process that is ready."""
        self._threads = [
            threading.Thread(target=self._run, args=(worker,), name=f"{name}-{worker}", daemon=True)
            for worker in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that are ready, by worker."""
        with self._change:
            return [process.pid for _, process in sorted(self._processes.items())]

    def close(self) -> None:
        """Kill all processes and their children, and wait for them; running calls fail."""
        with self._change:
            if self._closed:
                return
            self._closed = True
            self._change.notify_all()
        os.close(self._close)
        for thread in self._threads:
            thread.join()
        os.close(self._closing)

    @abstractmethod
    def _work(self, worker: int) -> None:
        """Call processes until the pool is closed. Raises WorkersUnavailable, PoolClosed."""

    def _wait_for(self, done: Callable[[], bool]) -> None:
        """Wait until `done()`; if that fails, close the pool. Raises WorkersUnavailable."""
        try:
            with self._change:
                self._change.wait_for(lambda: done() or self._failure or self._closed)
                if self._failure is not None:
                    raise self._failure
        except BaseException:
            self.close()
            raise

    def _open(self, worker: int, process: WorkerProcess, limit_s: float) -> Mapping[str, Any]:
        """Wait until a started process has replied to its setup; it is the worker's if it is ready.

        Raises TimeoutError, ProcessEnded, PoolClosed.
        """
        reply = process.reply(limit_s, self._closing)
        if "ready" not in reply:
            process.kill()
            return reply
        with self._change:
            self._processes[worker] = process
            self._change.notify_all()
        return reply

    def _drop(self, worker: int) -> None:
        """Kill the worker's process, if it has one."""
        with self._change:
            process = self._processes.pop(worker, None)
        if process is not None:
            process.kill()

    def _run(self, worker: int) -> None:
        try:
            self._work(worker)
        except PoolClosed:
            return
        except WorkersUnavailable as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - else callers wait for this thread for ever
            self._fail(WorkersUnavailable(f"a worker process failed: {error!r}"))
        finally:
            self._drop(worker)

    def _fail(self, error: WorkersUnavailable) -> None:
        with self._change:
            self._failure = error
            self._change.notify_all()
