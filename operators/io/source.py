"""A shard's source: opens sessions, polls, decodes. The transform around it only slices its work for the runner."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from infra.kafka.session import SESSIONS, Fenced, Partition, Session
from operators.io.config import ShardConfig
from operators.io.elements import Place, Polled, Received, Restored
from schemas.codec import UndecodableRecord, decode
from schemas.records import DeadLetter

log = logging.getLogger(__name__)


class ShardSource:
    """Yields `Restored` whenever a session had to be opened, else one `Polled` a call. Lives once a process and shard."""

    def __init__(self, config: ShardConfig, wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        self._config = config
        self._wall_ms = wall_ms
        self._nouns = {r.topic.name(config.run): r.topic.noun for r in config.readings}
        self._nouns |= {topic.name(config.run): topic.noun for topic, _ in config.ledger}
        self._keys = {r.topic.name(config.run): r.keys.encode() for r in config.readings if r.keys}
        self._session: Session | None = None
        self._caught_up = False

    def next(self, wait: bool) -> Restored | Polled:
        """The next element; an idle poll waits up to `poll_s` where `wait` is set.

        Raises Fenced when a successor works on this shard, KafkaError when no session can be opened.
        """
        session = self._session
        if session is None or session.lost is not None or SESSIONS.get(self._config.group) is not session:
            return self._open(session)
        records = session.poll(self._config.poll_s if wait else 0.0)
        if session.lost is not None:
            return self._open(session)
        positions = {self._place(p): offset for p, offset in session.positions().items()}
        if not self._caught_up:
            self._caught_up = all(positions[self._place(p)] >= end for p, end in session.ends.items())
        received, rejected = self.decode(records)
        return Polled(self._config.group, session.start, received, rejected, positions, self._caught_up)

    def decode(self, records: Iterable[object]) -> tuple[tuple[Received, ...], tuple[DeadLetter, ...]]:
        """Kafka records as `Received` rows, and a dead letter for each that is no record of ours."""
        received: list[Received] = []
        rejected: list[DeadLetter] = []
        for raw in records:
            topic, partition, offset, key, value = raw.topic, raw.partition, raw.offset, raw.key, raw.value  # type: ignore[attr-defined]
            wanted = self._keys.get(topic)
            if wanted and not (key or b"").startswith(wanted):
                continue
            try:
                rows = decode(value, raw.headers)  # type: ignore[attr-defined]
            except UndecodableRecord as error:
                letter = DeadLetter(
                    f"read {self._nouns[topic]}", str(error), topic, partition, offset, value or b"", self._wall_ms()
                )
                rejected.append(letter)
                continue
            received.extend(Received(self._nouns[topic], partition, offset, row) for row in rows)
        return tuple(received), tuple(rejected)

    def close(self) -> None:
        """Close the session; the next call opens another."""
        if self._session is not None:
            self._session = None
            SESSIONS.close(self._config.group)

    def _open(self, before: Session | None) -> Restored:
        config = self._config
        if before is not None:
            if isinstance(before.lost, Fenced):
                raise before.lost
            log.warning("opening a new session: %s", before.lost or "closed")
        session = self._session = SESSIONS.open(config.session())
        if config.resume is not None:
            session.seek({Partition(p.topic, p.partition): offset for p, offset in self._resumed().items()})
        self._caught_up = False
        ledger, _ = self.decode(session.ledger)
        offsets = {self._place(p): offset for p, offset in session.positions().items()}
        log.info("start %d of %s at %s, ledger of %d", session.start, config.group, offsets, len(ledger))
        return Restored(config.group, session.start, ledger, session.note.marks, offsets)

    def _resumed(self) -> dict[Place, int]:
        assert self._config.resume is not None
        names = {noun: name for name, noun in self._nouns.items()}
        return {Place(names[place.topic], place.partition): o for place, o in self._config.resume().items()}

    def _place(self, partition: Partition) -> Place:
        return Place(self._nouns[partition.topic], partition.partition)
