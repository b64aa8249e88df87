"""One start of one shard of one pipeline: what it reads, what it has committed, and the transactions it writes.

The shard's consumer and its transactional producer belong together and live once a process, here, for Beam keeps several
instances of a DoFn and two producers of one transactional.id would fence each other. Opening a session is the whole restart
protocol (invariant 5): fence the predecessor, read its committed offsets and note, mint the next start number, read the
ledger of outputs back. What was open before is aborted; nothing of a predecessor can commit afterwards.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from kafka import KafkaConsumer, KafkaProducer, OffsetAndMetadata, TopicPartition
from kafka.consumer.fetcher import ConsumerRecord
from kafka.errors import (
    InvalidProducerEpochError,
    KafkaError,
    ProducerFencedError,
)

from infra.kafka.properties import ClientProperties

log = logging.getLogger(__name__)

MAX_NOTE_BYTES = 2048
"""Brokers cap commit metadata at 4 KB."""
MAX_POLL_RECORDS = 2000
RETRY_BACKOFF_MS = 3
"""A transaction that begins before the markers of the last are written is told to try again: soon, not in 100 ms."""
TRANSACTION_TIMEOUT_MS = 10_000
"""An open transaction of a dead process holds back every read_committed reader for so long."""

Offsets = Mapping["Partition", int]


class Partition(NamedTuple):
    """A partition of a topic by its full name; equal to kafka-python's TopicPartition."""

    topic: str
    partition: int


@dataclass(frozen=True)
class Input:
    """A topic to read: from the committed offset (the earliest before there is one), the earliest, or the end as of the start."""

    topic: str
    partitions: tuple[int, ...]
    start: Literal["committed", "earliest", "latest"] = "committed"


@dataclass(frozen=True)
class SessionConfig:
    """Who reads what. `group` is the consumer group and the transactional.id. `outputs` are the topics of the ledger.

    The commit's note travels with `anchor`, the first input's first partition unless given (a pipeline without committed
    inputs anchors on a partition that it writes).
    """

    client: ClientProperties
    group: str
    inputs: tuple[Input, ...]
    ledger: tuple[Partition, ...] = ()
    anchor: Partition | None = None

    @property
    def anchored(self) -> Partition:
        return self.anchor or Partition(self.inputs[0].topic, self.inputs[0].partitions[0])


class Outgoing(NamedTuple):
    """An encoded record on its way out."""

    topic: str
    partition: int | None
    key: bytes | None
    value: bytes
    headers: Sequence[tuple[str, bytes]]


@dataclass(frozen=True)
class Note:
    """What a commit says beside offsets: the start number, where the ledger begins in each output, and the operator's own marks."""

    start: int = 0
    ledger: Mapping[str, int] = field(default_factory=dict)
    marks: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> str:
        text = json.dumps([self.start, self.ledger, self.marks], separators=(",", ":"))
        if len(text) > MAX_NOTE_BYTES:
            raise ValueError(
                f"a commit's note of {len(text)} bytes is over {MAX_NOTE_BYTES}: too many partitions a shard"
            )
        return text

    @classmethod
    def decode(cls, text: str | None) -> Note:
        return cls(*json.loads(text)) if text else cls()


class SessionLost(RuntimeError):
    """The outcome of a commit is unknown or Kafka gave the session up: open a new one, never send again."""


class Fenced(SessionLost):
    """A successor has taken over this shard: this process must end."""


class Session:
    """An open session. One thread uses it. `start` rises by one with every open, whichever process opens."""

    def __init__(self, config: SessionConfig) -> None:
        self.config = config
        self.lost: SessionLost | None = None
        self._producer = KafkaProducer(
            **config.client.producer(
                transactional_id=config.group,
                transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
                acks="all",
                linger_ms=0,
                retry_backoff_ms=RETRY_BACKOFF_MS,
                batch_size=1 << 20,
                metrics_enabled=False,
                max_request_size=16 * 1024 * 1024,
            )
        )
        self._consumer = KafkaConsumer(
            **config.client.consumer(
                group_id=config.group,
                enable_auto_commit=False,
                isolation_level="read_committed",
                auto_offset_reset="earliest",
                max_poll_records=MAX_POLL_RECORDS,
                fetch_max_wait_ms=500,
            )
        )
        try:
            self._producer.init_transactions()
            self._assigned = [TopicPartition(i.topic, p) for i in config.inputs for p in i.partitions]
            self._restore()
        except BaseException:
            self.close()
            raise

    def poll(self, timeout_s: float) -> list[ConsumerRecord]:
        """The next records, in order within each partition; empty after `timeout_s` seconds. Raises SessionLost."""
        if not self._assigned:
            return []
        try:
            polled = self._consumer.poll(timeout_ms=int(timeout_s * 1000))
        except KafkaError as error:
            raise self._give_up(error) from error
        return [record for records in polled.values() for record in records]

    def positions(self) -> dict[Partition, int]:
        """The next offset to read of every input partition."""
        return {Partition(*tp): self._consumer.position(tp) for tp in self._assigned}

    def seek(self, offsets: Offsets) -> None:
        """Read on from `offsets` instead of where the last start stood."""
        for partition, offset in offsets.items():
            self._consumer.seek(TopicPartition(*partition), offset)

    def commit(
        self, outputs: Iterable[Outgoing], offsets: Offsets, ledger: Mapping[str, int], marks: Mapping[str, Any]
    ) -> dict[str, int]:
        """Write `outputs`, `offsets` and the note in one transaction; the first offset written of each output partition.

        Raises SessionLost when the outcome is unknown, Fenced when a successor is at work.
        """
        note = Note(self.start, ledger, marks).encode()
        anchor = self.config.anchored
        committed = {
            TopicPartition(*p): OffsetAndMetadata(o, note if p == anchor else "", -1)
            for p, o in {anchor: 0, **offsets}.items()
        }
        try:
            self._producer.begin_transaction()
            sent = [
                self._producer.send(o.topic, key=o.key, value=o.value, headers=list(o.headers), partition=o.partition)
                for o in outputs
            ]
            self._producer.send_offsets_to_transaction(committed, self.config.group)
            self._producer.commit_transaction()
            first: dict[str, int] = {}
            for future in sent:
                written = future.get(timeout=0)
                first.setdefault(f"{written.topic}:{written.partition}", written.offset)
        except KafkaError as error:
            raise self._give_up(error) from error
        return first

    def close(self) -> None:
        """Let go of both connections; an open transaction is left to the successor's fence."""
        if hasattr(self, "_consumer"):
            self._consumer.close(autocommit=False, timeout_ms=1000)
        self._producer.close(timeout=1)

    def _give_up(self, error: KafkaError) -> SessionLost:
        fenced = isinstance(error, ProducerFencedError | InvalidProducerEpochError)
        self.lost = (Fenced if fenced else SessionLost)(f"{self.config.group}: {error!r}")
        return self.lost

    def _restore(self) -> None:
        config, consumer = self.config, self._consumer
        anchor = TopicPartition(*config.anchored)
        committed = {
            tp: consumer.committed(tp, metadata=True)
            for tp in dict.fromkeys([anchor, *(t for t, i in self._inputs() if i.start == "committed")])
        }
        before = Note.decode(committed[anchor].metadata if committed[anchor] else None)
        self.note = before
        self.ledger = self._read_ledger(before)
        consumer.assign(self._assigned)
        for tp, source in self._inputs():
            if source.start == "latest":
                consumer.seek_to_end(tp)
            elif source.start == "committed" and committed[tp]:
                consumer.seek(tp, committed[tp].offset)
            else:
                consumer.seek_to_beginning(tp)
        positions = self.positions()
        self.start = before.start + 1
        # `latest` inputs start at their end by definition; the others are caught up once they pass today's end.
        ends = consumer.end_offsets(self._assigned) if self._assigned else {}
        self.ends = {Partition(*tp): max(offset, 0) for tp, offset in ends.items()}
        # Minting is a commit like any other, so two starts can never bear one number.
        offsets = {p: positions[p] for p in positions if p in committed}
        anchored = committed[anchor].offset if committed[anchor] else positions.get(Partition(*anchor), 0)
        self.commit([], {Partition(*anchor): anchored, **offsets}, before.ledger, before.marks)

    def _inputs(self) -> list[tuple[TopicPartition, Input]]:
        return [(TopicPartition(i.topic, p), i) for i in self.config.inputs for p in i.partitions]

    def _read_ledger(self, note: Note) -> list[ConsumerRecord]:
        """What this shard has written of its ledger topics from the noted offsets to their ends, read_committed."""
        partitions = [TopicPartition(*p) for p in self.config.ledger]
        self.ledger_ends: dict[str, int] = {}
        if not partitions:
            return []
        consumer = self._consumer
        consumer.assign(partitions)
        ends = consumer.end_offsets(partitions)
        self.ledger_ends = {f"{tp.topic}:{tp.partition}": end for tp, end in ends.items()}
        for tp in partitions:
            consumer.seek(tp, note.ledger.get(f"{tp.topic}:{tp.partition}", 0))
        records: list[ConsumerRecord] = []
        while any(consumer.position(tp) < ends[tp] for tp in partitions):
            for polled in consumer.poll(timeout_ms=1000).values():
                records.extend(polled)
        return records


class _Sessions:
    """The sessions of this process, by group. The source opens them, the sink of the same shard finds them."""

    def __init__(self) -> None:
        self._open: dict[str, Session] = {}

    def open(self, config: SessionConfig) -> Session:
        """A new session for `config.group`, closing the one before."""
        self.close(config.group)
        session = self._open[config.group] = Session(config)
        return session

    def get(self, group: str) -> Session | None:
        """The session of `group` in this process, None before the first."""
        return self._open.get(group)

    def close(self, group: str) -> None:
        """Close the session of `group`, if there is one."""
        session = self._open.pop(group, None)
        if session is not None:
            session.close()


SESSIONS = _Sessions()
