"""A shard's source: it opens sessions, polls and decodes. The transform only slices its work for the runner."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from infra.clocks import wall_ms
from infra.kafka.log_gaps import CannotResume
from infra.kafka.open_transactions import StallWatch, describe_blocking_transactions
from infra.kafka.session import Fenced, Partition, Session, SessionLost
from infra.kafka.sessions import SESSIONS, Sessions
from infra.kafka.transactions import TransactionTooSlow
from infra.runners.liveness import LIVENESS
from infra.runners.stopping import STOPPING
from operators.io.config import ShardConfig, opened_for
from operators.io.elements import PartitionKey, Polled, ReceivedRecord, Restored
from schemas.block_codec import decode_block
from schemas.codec import MAX_VALUE_BYTES, UndecodableRecord, decode
from schemas.records import DeadLetter

log = logging.getLogger(__name__)

BUSY_REPOLL_S = 0.02
"""Pause between polls of a busy step after an empty one: each poll costs 0.5 ms. It bounds a record's extra wait."""
POSITIONS_MAX_AGE_S = 0.5
"""Maximum age of the positions of an empty poll: each partition's position costs a call to the client."""
STALLS_EVERY_S = 1.0
"""How often a busy reader looks for partitions that do not move."""
SESSION_TIMEOUT_S = 120.0
"""How long a running shard retries to open a session while Kafka is unavailable."""
FIRST_SESSION_TIMEOUT_S = 20.0
"""How long the first session is retried: long enough for a broken connection, short enough to report a refusal."""
MAX_SESSIONS_WITHOUT_COMMIT = 8
"""Consecutive sessions that may be lost without a commit of their own; beyond it the cause is permanent."""
MAX_SLOW_SESSIONS = 4
"""Consecutive sessions that may be lost in a transaction that is too slow; beyond it, it is too large for the link."""
LARGE_BYTES = 1 << 20
"""Of a transaction that may be too large for a link; a smaller one is slow because of the brokers."""
MAX_PAUSE_S = 5.0
MAX_PAYLOAD_BYTES = MAX_VALUE_BYTES - 64 * 1024
"""Of a dead letter; the remainder is for its other fields."""


class AlwaysTooSlow(CannotResume):
    """The transactions of a shard do not end within their time-out, in one session after the other."""


class ShardSource:
    """Returns `Restored` after it opened a session, else one `Polled` per call. There is one per process and shard.

    `wait` pauses between two attempts to open a session, and returns True when the process has to stop.
    """

    def __init__(
        self,
        config: ShardConfig,
        wall_ms: Callable[[], int] = wall_ms,
        clock: Callable[[], float] = time.monotonic,
        sessions: Sessions | None = None,
        wait: Callable[[float], bool] = STOPPING.wait,
    ) -> None:
        self.config = config
        self._clock, self._wait = clock, wait
        self._sessions = sessions or SESSIONS
        self._wall_ms = wall_ms
        read = [r.topic for r in config.inputs] + [topic for topic, _ in config.ledger]
        self._short_names = {topic.name(config.run): topic.short_name for topic in read}
        self._kinds = {topic.short_name: topic.record_classes for topic in read}
        self._blocks = {r.topic.name(config.run) for r in config.inputs if r.blocks}
        self._key_prefixes = {
            r.topic.name(config.run): tuple(key.encode() for key in r.keys) for r in config.inputs if r.keys
        }
        self._partition_keys = {
            Partition(r.topic.name(config.run), p): PartitionKey(r.topic.short_name, p)
            for r in config.inputs
            for p in r.partitions
        }
        LIVENESS.set_budget(config.group, config.budget)
        self._session: Session | None = None
        self._positions: Mapping[PartitionKey, int] = {}
        self._repoll_at = 0.0
        self._positions_due = 0.0
        self._caught_up = False
        self._behind: frozenset[str] = frozenset()
        self._unread: frozenset[str] = frozenset()
        self._stalls, self._stalls_due = StallWatch(clock), 0.0
        self._sessions_without_commit = 0
        self._first_start = 0
        self._polls = 0

    @property
    def ended(self) -> bool:
        """Whether a bounded shard has read everything that had been written when it started."""
        return self.config.bounded and self._caught_up

    def resume_at(self, poll: int) -> None:
        """Continue at the runner's poll number `poll`.

        If that is not the next one, the runner has failed and gone back: later polls may not have reached the step, so
        the next element begins a new start.
        """
        if self._session is not None and poll != self._polls and not isinstance(self._session.lost, Fenced):
            log.warning("%s: new start, since the runner went from poll %d to %d", self.config.group, self._polls, poll)
            self.close()
        self._polls = poll

    def next(self, wait: float) -> Restored | Polled:
        """Return the next element; an idle poll waits up to `wait` seconds, at most `poll_s`.

        Raises Fenced when a successor owns this shard, SessionLost when no session can be opened, and AlwaysTooSlow.
        """
        self._polls += 1
        session = self._session
        if session is None or session.lost is not None or self._sessions.get(self.config.group) is not session:
            return self._open(session)
        if not wait and self._clock() < self._repoll_at:
            return self._polled(session)
        try:
            records = session.poll(min(self.config.poll_s, wait))
            if records or not self._caught_up or self._clock() >= self._positions_due:
                self._update_positions(session, idle=not records)
            if not records:
                session.check_owner()
        except SessionLost:
            return self._open(session)
        self._repoll_at = 0.0 if records else self._clock() + BUSY_REPOLL_S
        received, rejected = self.decode(records)
        return self._polled(session, received, rejected)

    def final_poll(self) -> Polled | None:
        """The last element of this start, without records; None if there is no session to commit in."""
        session = self._session
        if session is None or session.lost is not None or self._sessions.get(self.config.group) is not session:
            return None
        self._polls += 1
        return self._polled(session, last=True)

    def decode(self, records: Iterable[Any]) -> tuple[tuple[ReceivedRecord, ...], tuple[DeadLetter, ...]]:
        """Kafka records as `ReceivedRecord` rows, and a dead letter for each that cannot be decoded."""
        received: list[ReceivedRecord] = []
        rejected: list[DeadLetter] = []
        for raw in records:
            wanted = self._key_prefixes.get(raw.topic)
            if wanted is not None and not (raw.key or b"").startswith(wanted):
                continue
            short_name = self._short_names[raw.topic]
            try:
                rows = self._rows(raw, short_name)
            except UndecodableRecord as error:
                rejected.append(self._dead_letter(raw, short_name, str(error)))
                continue
            received.extend([ReceivedRecord(short_name, raw.partition, raw.offset, row, raw.timestamp) for row in rows])
        return tuple(received), tuple(rejected)

    def close(self) -> None:
        """Close the session; the next call opens another."""
        if self._session is not None:
            self._session = None
            self._sessions.close(self.config.group)

    def _polled(
        self,
        session: Session,
        received: tuple[ReceivedRecord, ...] = (),
        rejected: tuple[DeadLetter, ...] = (),
        *,
        last: bool = False,
    ) -> Polled:
        place = self._positions, self._caught_up
        return Polled(self.config.group, session.start, received, rejected, *place, last, self._behind, self._unread)

    def _update_positions(self, session: Session, idle: bool) -> None:
        """Read the positions. Between records only transaction markers move them, so a late update is safe."""
        session.check_inputs()
        positions, ends = session.positions(), session.high_watermarks()
        unread = (place for place, end in ends.items() if end is not None and positions[place] < end)
        self._unread = frozenset(self._partition_keys[place].topic for place in unread)
        if idle or self._clock() >= self._stalls_due:  # others may hold one partition back while the rest is busy
            self._warn_of_stalls(positions, ends)
        self._positions = {self._partition_keys[p]: offset for p, offset in positions.items()}
        self._positions_due = self._clock() + POSITIONS_MAX_AGE_S
        if not self._caught_up:
            behind = [place for place, end in session.ends.items() if positions[place] < end]
            self._behind = frozenset(self._partition_keys[place].topic for place in behind)
            self._caught_up = not behind

    def _warn_of_stalls(self, positions: Mapping[Partition, int], ends: Mapping[Partition, int | None]) -> None:
        self._stalls_due = self._clock() + STALLS_EVERY_S
        if stalled := self._stalls.stalled(positions, ends):
            for line in describe_blocking_transactions(self.config.client, stalled):
                log.warning("%s waits: %s", self.config.group, line)

    def _open(self, before: Session | None) -> Restored:
        config = self.config
        session = self._session = self._session_after(before)
        if config.start_positions is not None:
            names = {key: partition for partition, key in self._partition_keys.items()}
            session.seek({names[key]: offset for key, offset in config.start_positions().items()})
        self._caught_up, self._repoll_at, self._unread = False, 0.0, frozenset()
        self._behind = frozenset(key.topic for key in self._partition_keys.values())
        ledger, undecodable = self.decode(session.ledger)  # others may write there; its readers write the dead letters
        offsets = self._positions = {self._partition_keys[p]: offset for p, offset in session.positions().items()}
        places = ", ".join(f"{key.topic} {key.partition}:{offset}" for key, offset in offsets.items()) or "no topic"
        log.info("start %d of %s from %s; %d finished in its ledger", session.start, config.group, places, len(ledger))
        for letter in undecodable:
            log.warning("%s, partition %d, offset %d: %s", letter.topic, letter.partition, letter.offset, letter.reason)
        self._first_start = self._first_start or session.start
        state = session.note.state
        return Restored(config.group, session.start, ledger, state, offsets, config.shard, self._first_start)

    def _session_after(self, before: Session | None) -> Session:
        """Open the session after `before`, or the first one; retry while Kafka is unavailable."""
        lost: SessionLost | None = None
        if before is not None:
            lost = before.lost or SessionLost(f"{self.config.group}: closed")
            self._sessions_without_commit = 0 if before.progress.made else self._sessions_without_commit + 1
            is_large = before.progress.failed_bytes >= LARGE_BYTES  # a small one was not too slow: Kafka was away
            is_slow = is_large and isinstance(lost.__cause__, TransactionTooSlow)
            if is_slow and self._sessions_without_commit >= MAX_SLOW_SESSIONS:
                raise AlwaysTooSlow(
                    f"{self._sessions_without_commit} sessions in a row were lost, the last in a transaction of "
                    f"{before.progress.failed_bytes} bytes: {lost} (it is {self.config.transaction_timeout_s:g}), and "
                    f"resume the run"
                ) from lost
        deadline = self._clock() + (FIRST_SESSION_TIMEOUT_S if before is None else SESSION_TIMEOUT_S)
        pause = 0.05 * 2**self._sessions_without_commit
        while not isinstance(lost, Fenced) and self._sessions_without_commit <= MAX_SESSIONS_WITHOUT_COMMIT:
            if lost is not None:
                log.warning("opening a new session in %.1f s: %s", pause, lost)
                if self._wait(pause):
                    break
            try:
                return self._sessions.open(self.config.session())
            except SessionLost as error:
                if self._clock() > deadline:
                    raise
                lost, pause = error, min(2 * pause, MAX_PAUSE_S)
        assert lost is not None  # `before` was lost, or an attempt failed
        raise lost

    def _rows(self, raw: Any, short_name: str) -> list[Any]:
        """The records in `raw`, or their block. Raises UndecodableRecord, also for a class of another topic."""
        if raw.topic in self._blocks:
            block = decode_block(raw.value, raw.headers)
            rows, kind = [block], block.kind
        else:
            rows = decode(raw.value, raw.headers)
            kind = type(rows[0])
        if kind not in self._kinds[short_name]:
            raise UndecodableRecord(f"a {kind.__name__} does not belong on {short_name}")
        return rows

    def _dead_letter(self, raw: Any, short_name: str, reason: str) -> DeadLetter:
        payload = raw.value or b""
        if len(payload) > MAX_PAYLOAD_BYTES:
            reason = f"{reason} (payload truncated from {len(payload)} to {MAX_PAYLOAD_BYTES} bytes)"
            payload = payload[:MAX_PAYLOAD_BYTES]
        place = short_name, raw.partition, raw.offset
        return DeadLetter(f"read {short_name}", reason, *place, payload, self._wall_ms())


_SOURCES: dict[str, ShardSource] = {}


def open_source(config: ShardConfig) -> ShardSource:
    """The source of `config`'s shard in this process."""
    return opened_for(config, _SOURCES, ShardSource)


def close_sources() -> None:
    """Close every source of this process, and its session."""
    while _SOURCES:
        _SOURCES.popitem()[1].close()
