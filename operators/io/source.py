"""A shard's source: opens sessions, polls, decodes. The transform around it only slices its work for the runner."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from infra.kafka.session import SESSIONS, Fenced, Partition, Session, SessionLost
from infra.kafka.stalls import StallWatch, held_back_by
from infra.runners.liveness import LIVENESS
from infra.runners.stopping import STOPPING
from operators.io.config import ShardConfig
from operators.io.elements import PartitionKey, Polled, ReceivedRecord, Restored
from schemas.block_codec import decode_block
from schemas.codec import MAX_VALUE_BYTES, UndecodableRecord, decode
from schemas.records import DeadLetter

log = logging.getLogger(__name__)

BUSY_POLL_S = 0.02
"""How long a busy step is left alone after a poll that found nothing: each costs it 0.5 ms. Records wait so long."""
POSITIONS_MAX_AGE_S = 0.5
"""How old the positions of a poll that found nothing may be: each partition's costs a question to the client."""
SESSION_TIMEOUT_S = 120.0
"""How long a running shard waits for Kafka to be back before it gives up."""
FIRST_SESSION_TIMEOUT_S = 20.0
"""How long the first session is tried for: a connection may break, but what is refused is to be seen soon."""
MAX_SESSIONS_WITHOUT_COMMIT = 8
"""Sessions in a row that may be lost without one commit of their own: more, and the cause will not pass by itself."""
MAX_PAUSE_S = 5.0
MAX_PAYLOAD_BYTES = MAX_VALUE_BYTES - 64 * 1024
"""Of a dead letter: what is around the payload must fit too."""


class ShardSource:
    """Yields `Restored` whenever it had to open a session, else one `Polled` a call. Lives once a process and shard."""

    def __init__(
        self,
        config: ShardConfig,
        wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._clock = clock
        self._wall_ms = wall_ms
        read = [r.topic for r in config.inputs] + [topic for topic, _ in config.ledger]
        self._short_names = {topic.name(config.run): topic.short_name for topic in read}
        self._kinds = {topic.short_name: topic.record_classes for topic in read}
        self._blocks = {r.topic.name(config.run) for r in config.inputs if r.blocks}
        self._keys = {r.topic.name(config.run): tuple(key.encode() for key in r.keys) for r in config.inputs if r.keys}
        self._places = {
            Partition(r.topic.name(config.run), p): PartitionKey(r.topic.short_name, p)
            for r in config.inputs
            for p in r.partitions
        }
        LIVENESS.set_budget(config.group, config.budget)
        self._session: Session | None = None
        self._positions: Mapping[PartitionKey, int] = {}
        self._rest_until = 0.0
        self._look_at = 0.0
        self._caught_up = False
        self._stalls = StallWatch(clock)
        self._futile = 0
        self._polls = 0

    @property
    def ended(self) -> bool:
        """Whether there is no more to read: of a shard that ends, what had been written when it started is seen."""
        return self.config.bounded and self._caught_up

    def begin(self, poll: int) -> None:
        """Say that the runner goes on at its poll number `poll`.

        Where that is not the next one the runner has gone back, having failed somewhere: what was polled since may not
        have arrived, so the next element begins a new start.
        """
        if self._session is not None and poll != self._polls and not isinstance(self._session.lost, Fenced):
            log.warning("%s: the runner went from poll %d to %d", self.config.group, self._polls, poll)
            self.close()
        self._polls = poll

    def next(self, wait: bool) -> Restored | Polled:
        """The next element; an idle poll waits up to `poll_s` where `wait` is set.

        Raises Fenced when a successor works on this shard, SessionLost when no session can be had.
        """
        self._polls += 1
        session = self._session
        if session is None or session.lost is not None or SESSIONS.get(self.config.group) is not session:
            return self._open(session)
        if not wait and self._clock() < self._rest_until:
            return Polled(self.config.group, session.start, (), (), self._positions, self._caught_up)
        try:
            records = session.poll(self.config.poll_s if wait else 0.0)
            if records or not self._caught_up or self._clock() >= self._look_at:
                self._look(session, quiet=not records)
        except SessionLost:
            return self._open(session)
        self._rest_until = 0.0 if records else self._clock() + BUSY_POLL_S
        received, rejected = self.decode(records)
        return Polled(self.config.group, session.start, received, rejected, self._positions, self._caught_up)

    def last(self) -> Polled | None:
        """The end of this start, which reads no more; None where there is no session to write in."""
        session = self._session
        if session is None or session.lost is not None or SESSIONS.get(self.config.group) is not session:
            return None
        self._polls += 1
        return Polled(self.config.group, session.start, (), (), self._positions, self._caught_up, last=True)

    def decode(self, records: Iterable[Any]) -> tuple[tuple[ReceivedRecord, ...], tuple[DeadLetter, ...]]:
        """Kafka records as `ReceivedRecord` rows, and a dead letter for each that is no record of ours."""
        received: list[ReceivedRecord] = []
        rejected: list[DeadLetter] = []
        for raw in records:
            wanted = self._keys.get(raw.topic)
            if wanted is not None and not (raw.key or b"").startswith(wanted):
                continue
            short_name = self._short_names[raw.topic]
            try:
                rows = self._rows(raw, short_name)
            except UndecodableRecord as error:
                rejected.append(self._dead_letter(raw, f"read {short_name}", str(error)))
                continue
            received.extend([ReceivedRecord(short_name, raw.partition, raw.offset, row, raw.timestamp) for row in rows])
        return tuple(received), tuple(rejected)

    def close(self) -> None:
        """Close the session; the next call opens another."""
        if self._session is not None:
            self._session = None
            SESSIONS.close(self.config.group)

    def _look(self, session: Session, quiet: bool) -> None:
        """See where reading stands. Between records only the marks of transactions move it, and being late is safe."""
        positions = session.positions()
        if quiet and (stalled := self._stalls.stalled(positions, session.highwaters())):
            for line in held_back_by(self.config.client, stalled):
                log.warning("%s waits: %s; `laminar topics transactions` ends it", self.config.group, line)
        self._positions = {self._places[p]: offset for p, offset in positions.items()}
        self._look_at = self._clock() + POSITIONS_MAX_AGE_S
        if not self._caught_up:
            self._caught_up = all(self._positions[self._places[p]] >= end for p, end in session.ends.items())

    def _open(self, before: Session | None) -> Restored:
        config = self.config
        session = self._session = self._session_after(before)
        if config.start_positions is not None:
            names = {place: partition for partition, place in self._places.items()}
            session.seek({names[place]: offset for place, offset in config.start_positions().items()})
        self._caught_up, self._rest_until = False, 0.0
        ledger, strange = self.decode(session.ledger)  # others may have written there too: their readers tell of it
        offsets = self._positions = {self._places[p]: offset for p, offset in session.positions().items()}
        log.info("start %d of %s at %s, ledger of %d", session.start, config.group, offsets, len(ledger))
        for letter in strange:
            log.warning("%s, partition %d, offset %d: %s", letter.topic, letter.partition, letter.offset, letter.reason)
        return Restored(config.group, session.start, ledger, session.note.state, offsets)

    def _session_after(self, before: Session | None) -> Session:
        """The session that follows `before`, or the first one; tried again while Kafka gives none."""
        lost: SessionLost | None = None
        if before is not None:
            lost = before.lost or SessionLost(f"{self.config.group}: closed")
            self._futile = 0 if before.commits > 1 else self._futile + 1  # a session's first commit is its own start
        deadline = time.monotonic() + (FIRST_SESSION_TIMEOUT_S if before is None else SESSION_TIMEOUT_S)
        pause = 0.05 * 2**self._futile
        while not isinstance(lost, Fenced) and self._futile <= MAX_SESSIONS_WITHOUT_COMMIT:
            if lost is not None:
                log.warning("opening a new session in %.1f s: %s", pause, lost)
                if STOPPING.wait(pause):
                    break
            try:
                return SESSIONS.open(self.config.session())
            except SessionLost as error:
                if time.monotonic() > deadline:
                    raise
                lost, pause = error, min(2 * pause, MAX_PAUSE_S)
        assert lost is not None  # `before` was lost, or an attempt has failed
        raise lost

    def _rows(self, raw: Any, short_name: str) -> list[Any]:
        """The records in `raw`, or their one block, of a class that belongs there. Raises UndecodableRecord."""
        if raw.topic in self._blocks:
            block = decode_block(raw.value, raw.headers)
            rows, kind = [block], block.kind
        else:
            rows = decode(raw.value, raw.headers)
            kind = type(rows[0])
        if kind not in self._kinds[short_name]:
            raise UndecodableRecord(f"a {kind.__name__} does not belong on {short_name}")
        return rows

    def _dead_letter(self, raw: Any, step: str, reason: str) -> DeadLetter:
        payload = raw.value or b""
        if len(payload) > MAX_PAYLOAD_BYTES:
            reason = f"{reason} (of its {len(payload)} bytes the first {MAX_PAYLOAD_BYTES} are kept)"
            payload = payload[:MAX_PAYLOAD_BYTES]
        return DeadLetter(step, reason, raw.topic, raw.partition, raw.offset, payload, self._wall_ms())
