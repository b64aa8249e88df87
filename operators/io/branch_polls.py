"""Polls of several shards in one process: each shard in a thread of its own, merged into one stream.

A shard's thread polls once, hands the element over, and polls again after the element has been folded. So at most one
element of a shard waits, a shard's elements keep their order, and no shard waits for the poll of another. The
positions of a poll include its records: an element that was handed over is always yielded before a later one, also
when the process stops, or a commit would cover records that were never folded.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from infra.runners.stopping import STOPPING
from operators.io.config import ShardConfig
from operators.io.elements import Polled, Restored
from operators.io.source import ShardSource

log = logging.getLogger(__name__)

CHECK_S = 0.1
"""How often a waiting stream checks whether the process has to stop."""


class BranchShard(NamedTuple):
    """A shard, and the branch of the pipeline that processes it."""

    branch: str
    shard: ShardConfig


class BranchPoll(NamedTuple):
    """An element of the shard `group`, for its branch."""

    branch: str
    group: str
    element: Restored | Polled


class BranchPolls:
    """The merged stream of `shards`. `idle_seconds` tells how long a shard's step has no work without new input."""

    def __init__(
        self,
        shards: Sequence[BranchShard],
        open_source: Callable[[ShardConfig], ShardSource],
        idle_seconds: Callable[[str], float],
    ) -> None:
        self.shards = tuple(shards)
        self._idle_seconds = idle_seconds
        self._sources = {each.shard.group: (each.branch, open_source(each.shard)) for each in shards}
        self._handed_over: queue.SimpleQueue[BranchPoll | _Failed] = queue.SimpleQueue()
        self._folded: Mapping[str, threading.Semaphore] = {group: threading.Semaphore(0) for group in self._sources}
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._poll, args=(group,), name=f"poll {group}", daemon=True)
            for group in self._sources
        ]
        for thread in self._threads:
            thread.start()

    def next(self) -> BranchPoll | None:
        """The next element; None if none came for a while. Raises the error of a shard's source."""
        try:
            found = self._handed_over.get(timeout=CHECK_S)
        except queue.Empty:
            return None
        if isinstance(found, _Failed):
            raise found.error
        return found

    def put_back(self, found: BranchPoll) -> None:
        """Take back an element that the runner did not accept: `next` or `stop` returns it again."""
        self._handed_over.put(found)

    def mark_folded(self, group: str) -> None:
        """Let the shard `group` poll again: its last element has been folded."""
        self._folded[group].release()

    def stop(self) -> list[BranchPoll]:
        """End the threads; the elements that they have handed over, which must still be yielded. Idempotent."""
        self._stopped.set()
        for folded in self._folded.values():
            folded.release()  # a thread that hands over one more element does not wait for it
        for thread in self._threads:
            thread.join()
        left = []
        while not self._handed_over.empty():
            found = self._handed_over.get()
            if isinstance(found, _Failed):
                log.warning("a source failed while it was stopped: %r", found.error)
            else:
                left.append(found)
        return left

    def final_polls(self) -> list[BranchPoll]:
        """The last element of every shard with a session, after `stop`."""
        finals = [(branch, group, source.final_poll()) for group, (branch, source) in self._sources.items()]
        return [BranchPoll(branch, group, final) for branch, group, final in finals if final is not None]

    def _poll(self, group: str) -> None:
        branch, source = self._sources[group]
        try:
            while not self._stopped.is_set() and not STOPPING.is_set():
                self._handed_over.put(BranchPoll(branch, group, source.next(wait=self._idle_seconds(group))))
                self._folded[group].acquire()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that processes the elements
            self._handed_over.put(_Failed(error))


class _Failed(NamedTuple):
    error: BaseException
