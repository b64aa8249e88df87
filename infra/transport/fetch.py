"""Fetch: one cargo into one memory, from whoever has it. A source that is lost costs its chunks under way, no more.

Each planned source has a connection and a thread, which pulls that source's chunks in the order of the plan. What a
lost source had left is pulled from the next survivor; a chunk that is not what it should be is asked for again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infra.transport.chunk_registry import Holding
from infra.transport.chunked_blob import ChunkedBlob
from infra.transport.frames import ProtocolError, TransportError
from infra.transport.peer import Absent, Peer
from infra.transport.schedules import Pull

log = logging.getLogger(__name__)

WINDOW = 2
"""Chunks that are asked for at once of one source: one comes while the next is asked for."""
MAX_CORRUPT = 3
"""Damaged chunks after which a source is left."""
REST_S = 0.3
"""How long a source that was lost, or does not have it, is left alone."""

Connect = Callable[[int], Peer]


@dataclass
class Counts:
    """What happened on the way: damaged chunks, sources lost, and bytes that had been asked for of those."""

    corrupted: int = 0
    lost: int = 0
    asked_again: int = 0


class Fetch:
    """Pulls what `holding` misses of `cargo`: as `plan` says, and where that fails from `others`, the first that can.

    `connect(source)` opens a connection that fills the memory of `holding`. Raises TransportError there.
    """

    def __init__(
        self,
        cargo: ChunkedBlob,
        holding: Holding,
        plan: Sequence[Pull],
        others: Sequence[int],
        connect: Connect,
        counts: Counts,
    ) -> None:
        self._holding, self._connect, self._counts = holding, connect, counts
        missing = set(holding.missing())
        wanted = [pull for pull in plan if pull.block in missing]
        self._order = [pull.block for pull in wanted]
        self._place = {block: place for place, block in enumerate(self._order)}
        self._turns = {pull.block: pull.step for pull in wanted}
        self._queues: dict[int, deque[int]] = {}
        for pull in wanted:
            self._queues.setdefault(pull.source, deque()).append(pull.block)
        self._lead = WINDOW + 2 * len(self._queues)
        self._low = 0
        self._orphans = deque(sorted(missing - set(self._order)))
        self._others = list(others)
        self._resting: dict[int, float] = {}
        self._peers: dict[Peer, int] = {}
        self._threads: list[threading.Thread] = []
        self._running = 0
        self._futile = 0
        self._ended = False
        self._changed = threading.Condition()

    def run(self, stop: Callable[[], bool], on_progress: Callable[[], None], patience: int = 3) -> bool:
        """Whether all of it came; not if `stop` says so, or every other source was tried `patience` times in vain.

        `on_progress` is called in this thread, as chunks come.
        """
        for source, queue in self._queues.items():
            self._begin(source, queue)
        try:
            while not self._holding.whole:
                with self._changed:
                    self._changed.wait(0.05)
                    hopeless = not self._running and self._futile >= patience * max(1, len(self._others))
                on_progress()
                if hopeless or stop():
                    return False
                self._adopt()
            on_progress()
            return True
        finally:
            self._end()

    def _adopt(self) -> None:
        """Give what nobody pulls to the first source that is not resting."""
        now = time.monotonic()
        with self._changed:
            if not self._orphans:
                return
            free = [source for source in self._others if self._resting.get(source, 0.0) <= now]
            busy = set(self._peers.values())
            source = next((each for each in free if each not in busy), free[0] if free else None)
            if source is None:
                return
            queue, self._orphans = self._orphans, deque()
            for chunk in queue:  # they are late: first of all
                self._place.pop(chunk, None)
                self._turns.pop(chunk, None)
        self._begin(source, queue)

    def _begin(self, source: int, queue: deque[int]) -> None:
        thread = threading.Thread(target=self._pull, args=(source, queue), name=f"pull from {source}", daemon=True)
        with self._changed:
            self._running += 1
            self._threads.append(thread)
        thread.start()

    def _pull(self, source: int, queue: deque[int]) -> None:
        peer: Peer | None = None
        lost = ""  # what an error says, not the error: its frames would hold on to the memory
        absent = False
        try:
            peer = self._connect(source)
            with self._changed:
                self._peers[peer] = source
            self._pull_all(peer, queue)
        except TransportError as error:
            lost, absent = str(error) or type(error).__name__, isinstance(error, Absent)
        finally:
            asked = peer.asked if peer is not None else []
            with self._changed:
                if peer is not None:
                    peer.close()
                    self._peers.pop(peer, None)
                self._running -= 1
                self._orphans.extend(sorted([*asked, *queue]))
                if lost and not self._ended:
                    self._futile += 1
                    self._resting[source] = time.monotonic() + REST_S
                    if not absent:
                        self._counts.lost += 1
                        self._counts.asked_again += len(asked)
                        log.info("source %d is lost, %d chunks go elsewhere: %s", source, len(queue), lost)
                self._changed.notify_all()

    def _pull_all(self, peer: Peer, queue: deque[int]) -> None:
        corrupt = 0
        while queue or peer.asked:
            while queue and len(peer.asked) < WINDOW and self._may_ask(queue[0], wait=not peer.asked):
                chunk = queue.popleft()
                peer.ask(chunk, self._turns.get(chunk, 0))
            if self._ended:
                return
            if not peer.asked:
                continue
            chunk, good = peer.take()
            if good:
                self._came(chunk)
                continue
            corrupt += 1
            self._counts.corrupted += 1
            log.warning("chunk %d is damaged; asking again", chunk)
            queue.appendleft(chunk)
            if corrupt >= MAX_CORRUPT:
                raise ProtocolError(f"{corrupt} damaged chunks")

    def _may_ask(self, chunk: int, *, wait: bool) -> bool:
        """Whether it is the turn of `chunk`: a source must not run ahead of the others' places in the plan."""
        with self._changed:
            place = self._place.get(chunk)
            if place is None:
                return True
            if wait:
                self._changed.wait_for(lambda: self._ended or place < self._low + self._lead, 0.5)
            return place < self._low + self._lead

    def _came(self, chunk: int) -> None:
        self._holding.mark(chunk)
        with self._changed:
            self._futile = 0
            while self._low < len(self._order) and self._holding.has(self._order[self._low]):
                self._low += 1
            self._changed.notify_all()

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            peers = list(self._peers)
            self._changed.notify_all()
        for peer in peers:
            peer.interrupt()
        for thread in self._threads:
            thread.join(timeout=10)
