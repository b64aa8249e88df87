"""Fetch: pulls one blob into memory from several sources. Losing a source costs only its chunks in flight.

Each planned source has a connection and a thread, which pulls that source's chunks in the order of the plan. The
remaining chunks of a lost source are pulled from the next available one; a corrupted chunk is requested again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from blake3 import blake3

from infra.system import SYSTEM, System, Thread
from infra.transport.chunk_registry import BlobBuffer
from infra.transport.chunked_blob import ChunkedBlob, full_blob
from infra.transport.frames import ProtocolError, TransportError
from infra.transport.peer import BlobAbsent, Peer, dial
from infra.transport.schedules import Pull
from infra.transport.throttle import Link
from infra.transport.tls import Tls
from infra.transport.topology import find_link
from schemas.records import RelayChain, WeightVersion

log = logging.getLogger(__name__)

WINDOW = 2
"""Requests in flight for each source: one chunk arrives while the next is requested."""
MAX_CORRUPT = 3
"""Corrupted chunks after which a source is abandoned."""
BACKOFF_S = 0.3
"""Seconds before a source that was lost, or does not have the blob, is tried again."""

Connect = Callable[[int], Peer]


@dataclass
class TransferCounts:
    """Corrupted chunks, lost sources, and chunks requested again because their source was lost."""

    corrupted: int = 0
    lost: int = 0
    requested_again: int = 0


class Fetch:
    """Pulls the missing chunks of `blob` into `buffer` by `plan`; if a source fails, from `fallbacks` in order.

    `connect(source)` opens a connection that fills the memory of `buffer`; it raises TransportError.
    """

    def __init__(
        self,
        blob: ChunkedBlob,
        buffer: BlobBuffer,
        plan: Sequence[Pull],
        fallbacks: Sequence[int],
        connect: Connect,
        counts: TransferCounts,
        system: System = SYSTEM,
    ) -> None:
        self._buffer, self._connect, self._counts, self._system = buffer, connect, counts, system
        missing = set(buffer.missing())
        wanted = [pull for pull in plan if pull.block in missing]
        self._order = [pull.block for pull in wanted]
        self._position = {block: position for position, block in enumerate(self._order)}
        self._steps = {pull.block: pull.step for pull in wanted}
        self._queues: dict[int, deque[int]] = {}
        for pull in wanted:
            self._queues.setdefault(pull.source, deque()).append(pull.block)
        self._max_ahead = WINDOW + 2 * len(self._queues)
        self._first_missing = 0
        self._orphans = deque(sorted(missing - set(self._order)))
        self._fallbacks = list(fallbacks)
        self._backoff_until: dict[int, float] = {}
        self._peers: dict[Peer, int] = {}
        self._threads: list[Thread] = []
        self._running = 0
        self._failures = 0
        self._ended = False
        self._changed = system.condition()

    def run(self, stop: Callable[[], bool], on_progress: Callable[[], None], max_attempts: int = 3) -> bool:
        """Fetch and return whether the blob is complete.

        Returns False once `stop()` is true, or after `max_attempts` failures for each fallback without a chunk
        between them. `on_progress` is called in this thread as chunks arrive.
        """
        for source, queue in self._queues.items():
            self._start_source(source, queue)
        try:
            while not self._buffer.complete:
                with self._changed:
                    self._changed.wait(0.05)
                    exhausted = not self._running and self._failures >= max_attempts * max(1, len(self._fallbacks))
                on_progress()
                if exhausted or stop():
                    return False
                self._reassign_orphans()
            on_progress()
            return True
        finally:
            self._end()

    def _reassign_orphans(self) -> None:
        """Assign chunks without a source to the first fallback that is not backing off."""
        now = self._system.monotonic()
        with self._changed:
            if not self._orphans:
                return
            free = [source for source in self._fallbacks if self._backoff_until.get(source, 0.0) <= now]
            busy = set(self._peers.values())
            source = next((each for each in free if each not in busy), free[0] if free else None)
            if source is None:
                return
            queue, self._orphans = self._orphans, deque()
            for chunk in queue:  # they are late, so no plan delays them
                self._position.pop(chunk, None)
                self._steps.pop(chunk, None)
        self._start_source(source, queue)

    def _start_source(self, source: int, queue: deque[int]) -> None:
        with self._changed:
            self._running += 1
        self._threads.append(self._system.start_thread(f"pull from {source}", partial(self._pull, source, queue)))

    def _pull(self, source: int, queue: deque[int]) -> None:
        peer: Peer | None = None
        lost = ""  # the message, not the error: the frames of an error would keep the memory alive
        absent = False
        try:
            peer = self._connect(source)
            with self._changed:
                self._peers[peer] = source
            self._pull_all(peer, queue)
        except TransportError as error:
            lost, absent = str(error) or type(error).__name__, isinstance(error, BlobAbsent)
        finally:
            pending = peer.pending if peer is not None else []
            with self._changed:
                if peer is not None:
                    peer.close()
                    self._peers.pop(peer, None)
                self._running -= 1
                self._orphans.extend(sorted([*pending, *queue]))
                if lost and not self._ended:
                    self._failures += 1
                    self._backoff_until[source] = self._system.monotonic() + BACKOFF_S
                    if not absent:
                        self._counts.lost += 1
                        self._counts.requested_again += len(pending)
                        log.info("source %d is lost, reassigning its %d chunks: %s", source, len(queue), lost)
                self._changed.notify_all()

    def _pull_all(self, peer: Peer, queue: deque[int]) -> None:
        corrupt = 0
        while queue or peer.pending:
            while queue and len(peer.pending) < WINDOW and self._may_request(queue[0], wait=not peer.pending):
                chunk = queue.popleft()
                peer.request(chunk, self._steps.get(chunk, 0))
            if self._ended:
                return
            if not peer.pending:
                continue
            chunk, valid = peer.receive_chunk()
            if valid:
                self._on_chunk(chunk)
                continue
            corrupt += 1
            self._counts.corrupted += 1
            log.warning("chunk %d is corrupted; requesting it again", chunk)
            queue.appendleft(chunk)
            if corrupt >= MAX_CORRUPT:
                raise ProtocolError(f"the source sent {corrupt} corrupted chunks")

    def _may_request(self, chunk: int, *, wait: bool) -> bool:
        """Whether `chunk` may be requested now: a source must not run too far ahead of the others in the plan."""
        with self._changed:
            position = self._position.get(chunk)
            if position is None:
                return True
            if wait:
                self._changed.wait_for(lambda: self._ended or position < self._first_missing + self._max_ahead, 0.5)
            return position < self._first_missing + self._max_ahead

    def _on_chunk(self, chunk: int) -> None:
        self._buffer.mark_present(chunk)
        with self._changed:
            self._failures = 0
            while self._first_missing < len(self._order) and self._buffer.has(self._order[self._first_missing]):
                self._first_missing += 1
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


def download(
    manifest: WeightVersion, chain: RelayChain, run: str, token: str, memory: memoryview, tls: Tls | None = None
) -> None:
    """Fill `memory`, uint8[manifest.bytes], with a version and verify it.

    Raises TransportError, and ValueError for bytes that do not match the manifest.
    """
    blob = full_blob(manifest)
    buffer = BlobBuffer(memory, blob)
    link, counts = Link(), TransferCounts()

    def connect(source: int) -> Peer:
        link_of_source = find_link(chain, source)
        assert link_of_source is not None
        return dial(link_of_source.address, run, token, -1, blob, memory, link, False, tls)

    order = [each.relay for each in chain.links]
    if not Fetch(blob, buffer, (), order, connect, counts).run(lambda: False, lambda: None, max_attempts=2):
        raise TransportError(f"none of {len(order)} relays delivered version {manifest.version}")
    if (digest := blake3(memory).hexdigest()) != manifest.blake3:
        raise ValueError(f"version {manifest.version} arrived with blake3 {digest}, expected {manifest.blake3}")
