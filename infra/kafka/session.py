"""One start of one shard of one pipeline: what it reads, what it has committed, and the transactions it writes.

The shard's consumer and its transactional producer belong together and live once a process, here, for Beam keeps
several instances of a DoFn and two producers of one transactional.id would fence each other. Opening a session is the
whole restart protocol (invariant 5): fence the predecessor, read its committed offsets and note, read the ledger of
outputs back, mint the next start number. What was open before is aborted; a predecessor can commit nothing any more.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kafka import KafkaConsumer, OffsetAndMetadata, TopicPartition
from kafka.consumer.fetcher import ConsumerRecord
from kafka.errors import InvalidProducerEpochError, KafkaError, KafkaTimeoutError, ProducerFencedError

from infra.kafka.note import MAX_METADATA_BYTES, Note, pointed_at, pointer
from infra.kafka.readiness import why_unreachable
from infra.kafka.session_config import Input, Offsets, Partition, SessionConfig
from infra.kafka.transactions import TransactionalProducer
from infra.kafka.wide_reads import read_widely
from schemas.codec import decode, encode
from schemas.records import CommitNote

MAX_POLL_RECORDS = 2000
RETRY_BACKOFF_MS = 3
"""A transaction that begins before the markers of the last are written is told to try again: soon, not in 100 ms."""
TRANSACTION_TIMEOUT_MS = 10_000
"""An open transaction of a dead process holds back every read_committed reader for so long."""
RECONNECT = {"reconnect_backoff_max_ms": 500}
"""A broker that is back is found within half a second, unless the client's properties say otherwise (30 s)."""
LEDGER_POLL_MS = 20
"""Short: what ends a topic is a transaction's marker, which no poll returns."""
REOPEN_S = 60.0
"""How long a commit under way may take to end before a new session replaces its own: a broker may have to come back."""
ANSWER_MS = 10_000
"""How long one question to Kafka may take. Unless told, kafka-python waits for ever where a connection broke."""
CATCH_UP_S = 60.0
"""How long reading the ledger back may stand still: longer than any transaction of another producer may stay open."""


class Outgoing(NamedTuple):
    """An encoded record on its way out."""

    topic: str
    partition: int | None
    key: bytes | None
    value: bytes
    headers: Sequence[tuple[str, bytes]]


class SessionLost(RuntimeError):
    """The outcome of a commit is unknown or Kafka gave the session up: open a new one, never send again."""


class Fenced(SessionLost):
    """A successor has taken over this shard: this process must end."""


class Session:
    """An open session: one thread polls, one may commit. Raises SessionLost where Kafka gives none.

    `start` rises by one with every session of a group, whichever process opens it.
    """

    start: int
    """The number of this start."""
    note: Note
    """What the last commit before this start said."""
    ledger: list[ConsumerRecord]
    """What this shard had written of its ledger topics, from the noted offsets on."""
    ledger_ends: dict[str, int]
    """The end of each ledger partition, "topic:partition", as of this start."""
    ends: dict[Partition, int]
    """The end of each input as of this start, whatever was still in open transactions then included."""

    def __init__(self, config: SessionConfig) -> None:
        self.config = config
        self.lost: SessionLost | None = None
        self.commits = 0
        self._committing = threading.Lock()
        self._anchored = 0
        self._producer: Any = None
        self._consumer: Any = None
        self._assigned = [TopicPartition(i.topic, p) for i in config.inputs for p in i.partitions]
        try:
            self._open()
        except KafkaError as error:
            self.close()
            raise self._give_up(error) from error
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        read_widely()
        # Asked first: a client that finds no broker takes 30 s to say so, and leaves its sockets open.
        if (reason := why_unreachable(self.config.client.admin(), timeout_s=2.0)) is not None:
            raise SessionLost(f"{self.config.group}: {reason}")
        self._producer = TransactionalProducer(
            **RECONNECT
            | self.config.client.producer(
                transactional_id=self.config.group,
                transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
                acks="all",
                linger_ms=0,
                retry_backoff_ms=RETRY_BACKOFF_MS,
                batch_size=1 << 20,
                metrics_enabled=False,
                max_request_size=16 * 1024 * 1024,
            )
        )
        self._producer.init_transactions()
        # Of no group: each poll of a group's member asks another thread who coordinates it, half of what a poll costs.
        self._consumer = self._reader(None)
        self._restore()

    def _reader(self, group: str | None) -> Any:
        return KafkaConsumer(
            **RECONNECT
            | self.config.client.consumer(
                group_id=group,
                enable_auto_commit=False,
                isolation_level="read_committed",
                auto_offset_reset="earliest",
                max_poll_records=MAX_POLL_RECORDS,
                fetch_max_wait_ms=500,
                metrics_enabled=False,
            )
        )

    def poll(self, timeout_s: float) -> list[ConsumerRecord]:
        """The next records, in order within each partition; empty after `timeout_s` seconds. Raises SessionLost."""
        if not self._assigned:
            time.sleep(timeout_s)
            return []
        try:
            polled = self._consumer.poll(timeout_ms=int(timeout_s * 1000))
        except KafkaError as error:
            raise self._give_up(error) from error
        return [record for records in polled.values() for record in records]

    def positions(self) -> dict[Partition, int]:
        """The next offset to read of every input partition. Raises SessionLost."""
        try:
            return {Partition(*tp): self._position(tp) for tp in self._assigned}
        except KafkaError as error:
            raise self._give_up(error) from error

    def _position(self, place: TopicPartition) -> int:
        """The next offset to read. Raises KafkaTimeoutError."""
        position: int | None = self._consumer.position(place, timeout_ms=ANSWER_MS)
        if position is None:
            raise KafkaTimeoutError(f"{self.config.group}: where reading stands in {place} is not known")
        return position

    def seek(self, offsets: Offsets) -> None:
        """Read on from `offsets` instead of where the last start stood."""
        for partition, offset in offsets.items():
            self._consumer.seek(TopicPartition(*partition), offset)

    def commit(
        self, outputs: Iterable[Outgoing], offsets: Offsets, ledger: Mapping[str, int], marks: Mapping[str, Any]
    ) -> dict[str, int]:
        """Write `outputs`, `offsets` and the note in one transaction; the first offset written of each partition.

        Raises SessionLost when the outcome is unknown, Fenced when a successor is at work, ValueError for a note that
        is too long.
        """
        note = Note(self.start, ledger, marks).encode()
        with self._committing:
            if self.lost is not None:
                raise self.lost
            self._anchored = offsets.get(self.config.anchored, self._anchored)
            sent: list[Any] = []
            try:
                self._producer.begin_transaction()
                for o in outputs:
                    sent.append(self._producer.send(o.topic, o.value, o.key, list(o.headers), o.partition))
                metadata = note if len(note) <= MAX_METADATA_BYTES else self._set_down(note)
                committed = {
                    TopicPartition(*p): OffsetAndMetadata(offset, metadata if p == self.config.anchored else "", -1)
                    for p, offset in {**offsets, self.config.anchored: self._anchored}.items()
                }
                self._producer.send_offsets_to_transaction(committed, self.config.group)
                self._producer.commit_transaction()
                first: dict[str, int] = {}
                for future in sent:
                    written = future.get(timeout=0)
                    first.setdefault(f"{written.topic}:{written.partition}", written.offset)
            except KafkaError as error:
                raise self._give_up(error, *(f.exception for f in sent if f.is_done)) from error
            self.commits += 1
            return first

    def close(self, patience_s: float = 1.0) -> None:
        """Let go of both connections, after a commit under way; a longer one is left to the successor's fence."""
        self.lost = self.lost or SessionLost(f"{self.config.group}: closed")
        if self._committing.acquire(timeout=patience_s):
            self._committing.release()
        if self._consumer is not None:
            self._consumer.close(autocommit=False, timeout_ms=1000)
        if self._producer is not None:
            with contextlib.suppress(KafkaError):  # that some records were not sent
                self._producer.close(timeout=1)

    def _give_up(self, error: KafkaError, *others: BaseException | None) -> SessionLost:
        fenced = any(isinstance(e, ProducerFencedError | InvalidProducerEpochError) for e in (error, *others))
        self.lost = (Fenced if fenced else SessionLost)(f"{self.config.group}: {error!r}")
        return self.lost

    def _set_down(self, note: str) -> str:
        """Write a long note to the topic `restore`, in the transaction that is open; what the metadata says then."""
        if self.config.restore is None:
            raise ValueError(f"{self.config.group}: a note of {len(note)} bytes, and no topic for it")
        (value, headers), topic = (
            encode(CommitNote(self.config.group, note, time.time_ns() // 10**6)),
            self.config.restore,
        )
        written = self._producer.send(topic.topic, value, self.config.group.encode(), list(headers), topic.partition)
        self._producer.flush()
        return pointer(written.get(timeout=0).offset)

    def _noted(self, metadata: str) -> Note:
        """The note of the last commit, whose metadata is `metadata`."""
        offset = pointed_at(metadata)
        if offset is None:
            return Note.decode(metadata)
        if self.config.restore is None:
            raise ValueError(f"{self.config.group}: the last commit's note is in a topic that is not given")
        place = TopicPartition(*self.config.restore)
        found = self._read({place: offset}, {place: offset + 1})
        if not found or found[0].offset != offset:
            raise ValueError(f"{self.config.group}: the last commit's note is not at offset {offset} of {place.topic}")
        return Note.decode(decode(found[0].value, found[0].headers)[0].note)

    def _restore(self) -> None:
        config, consumer, assigned = self.config, self._consumer, self._assigned
        anchor = TopicPartition(*config.anchored)
        committed = self._committed([anchor, *(t for t, i in self._inputs() if i.start == "committed")])
        self.note = self._noted(committed[anchor].metadata if committed[anchor] else "")
        self.start = self.note.start + 1
        ledger = [TopicPartition(*p) for p in config.ledger]
        ends = self._ends([*ledger, *assigned])
        self.ledger_ends = {f"{tp.topic}:{tp.partition}": ends[tp] for tp in ledger}
        noted = self.note.ledger
        begins = {tp: noted.get(f"{tp.topic}:{tp.partition}", 0) for tp in ledger}
        self.ledger = self._read(begins, {tp: ends[tp] for tp in ledger})
        consumer.assign(assigned)
        for tp, source in self._inputs():
            if source.start == "latest":
                consumer.seek_to_end(tp)
            elif source.start == "committed" and committed[tp]:
                consumer.seek(tp, committed[tp].offset)
            else:
                consumer.seek_to_beginning(tp)
        positions = self.positions()
        self.ends = {Partition(*tp): ends[tp] for tp in assigned}
        self._anchored = committed[anchor].offset if committed[anchor] else positions.get(config.anchored, 0)
        # Minting is a commit like any other, so two starts can never bear one number.
        offsets = {p: offset for p, offset in positions.items() if p in committed}
        self.commit([], offsets, self.note.ledger, self.note.marks)

    def _committed(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, Any]:
        """What the group has committed of `places`, open transactions waited for."""
        asker = self._reader(self.config.group)
        try:
            asked = dict.fromkeys(places)
            return {tp: asker.committed(tp, metadata=True, timeout_ms=ANSWER_MS) for tp in asked}
        finally:
            asker.close(autocommit=False, timeout_ms=1000)

    def _inputs(self) -> list[tuple[TopicPartition, Input]]:
        return [(TopicPartition(i.topic, p), i) for i in self.config.inputs for p in i.partitions]

    def _ends(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """Ends that count open transactions.

        A read_committed consumer's own answer stops before the first open transaction of *any* producer, which may lie
        before records that this shard has committed.
        """
        if not partitions:
            return {}
        consumer = KafkaConsumer(**self.config.client.consumer(group_id=None, enable_auto_commit=False))
        try:
            return dict(consumer.end_offsets(list(dict.fromkeys(partitions))))
        finally:
            consumer.close(autocommit=False)

    def _read(self, begins: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]) -> list[ConsumerRecord]:
        """What is committed from `begins` to `ends`, or a little beyond."""
        consumer = self._consumer
        consumer.assign(list(begins))
        for tp, offset in begins.items():
            consumer.seek(tp, offset)
        records: list[ConsumerRecord] = []
        before, moved_at = -1, time.monotonic()
        while any(self._position(tp) < end for tp, end in ends.items()):
            for polled in consumer.poll(timeout_ms=LEDGER_POLL_MS).values():
                records.extend(polled)
            if (now := sum(map(self._position, ends))) != before:
                before, moved_at = now, time.monotonic()
            elif time.monotonic() - moved_at > CATCH_UP_S:
                raise KafkaTimeoutError(f"{self.config.group}: its own output cannot be read on to {ends}")
        return records


class _Sessions:
    """The sessions of this process, by group. The source opens them, the sink of the same shard finds them."""

    def __init__(self) -> None:
        self._open: dict[str, Session] = {}

    def open(self, config: SessionConfig) -> Session:
        """A new session for `config.group`, closing the one before. Raises SessionLost where Kafka gives none."""
        self.close(config.group, patience_s=REOPEN_S)
        session = self._open[config.group] = Session(config)
        return session

    def get(self, group: str) -> Session | None:
        """The session of `group` in this process, None before the first."""
        return self._open.get(group)

    def close(self, group: str, patience_s: float = 1.0) -> None:
        """Close the session of `group`, if there is one."""
        session = self._open.pop(group, None)
        if session is not None:
            session.close(patience_s)


SESSIONS = _Sessions()
