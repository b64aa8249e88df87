"""Records of a topic as they stand there, decoded: for people and audits. No group is joined, nothing is committed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kafka import KafkaConsumer, TopicPartition
from kafka.consumer.fetcher import ConsumerRecord

from infra.kafka.offset_span import Edge, OffsetSpan
from infra.kafka.properties import ClientProperties
from infra.kafka.start_offset import BEGINNING, StartOffset
from infra.kafka.wide_reads import read_widely
from schemas.codec import UndecodableRecord, decode

POLL_MS = 500
MAX_POLL_RECORDS = 5000
"""Each poll has a price of its own, which small records share."""
Decoder = Callable[[bytes | None, Iterable[tuple[str, bytes]]], Sequence[Any]]


class UnknownTopic(RuntimeError):
    """The topic, or one of the partitions asked for, does not exist."""


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """One record as it stands in a topic. `rows` are its decoded records, empty where `error` says why it has none.

    `timestamp` is in Unix milliseconds, `size` is the value's, in bytes (0 for a tombstone).
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    size: int
    rows: tuple[Any, ...]
    error: str | None

    @property
    def schema(self) -> str:
        """What the record says it is, e.g. "Trajectory/1"; "" where it does not say."""
        return next((value.decode(errors="replace") for name, value in self.headers if name == "laminar-schema"), "")


@dataclass(frozen=True, slots=True)
class PartitionRange:
    """What one partition holds for a read_committed reader: offsets `beginning` up to, but not including, `end`."""

    beginning: int
    end: int


def partition_ranges(client: ClientProperties, topic: str) -> dict[int, PartitionRange]:
    """What each partition of `topic` holds. Raises UnknownTopic."""
    with _consumer(client) as consumer:
        return _ranges(consumer, topic, None)


def resolve_span(
    client: ClientProperties, topic: str, span: OffsetSpan, partitions: Sequence[int] | None = None
) -> dict[int, PartitionRange]:
    """What `span` is in each partition of `topic`. Raises UnknownTopic."""
    with _consumer(client) as consumer:
        ranges = _ranges(consumer, topic, partitions)
        return {number: PartitionRange(*edges) for number, edges in _edges(consumer, topic, span, ranges).items()}


def read_topic(
    client: ClientProperties,
    topic: str,
    *,
    start: StartOffset | Mapping[int, int] = BEGINNING,
    partitions: Sequence[int] | None = None,
    follow: bool = False,
    until: Mapping[int, int] | None = None,
    decoder: Decoder = decode,
) -> Iterator[StoredRecord]:
    """The committed records of `topic` from `start` to its end as of now, or for ever when it is to `follow`.

    `start` may give each partition's. `until` gives the end of each partition where it is not to be that of now;
    `decoder` gives a record's `rows` of its value and headers, or raises UndecodableRecord. In order within each
    partition. Raises UnknownTopic.
    """
    with _consumer(client) as consumer:
        ranges = _ranges(consumer, topic, partitions)
        for number, end in (until or {}).items():
            if number in ranges:
                ranges[number] = PartitionRange(ranges[number].beginning, end)
        assigned = _assign(consumer, topic, ranges, start)
        # A position passes the markers of transactions too, so it reaches the end where no record stands.
        while follow or any(consumer.position(assigned[number]) < held.end for number, held in ranges.items()):
            for records in consumer.poll(timeout_ms=POLL_MS).values():
                for record in records:
                    if follow or record.offset < ranges[record.partition].end:
                        yield _stored(record, decoder)


def follow_topic(
    client: ClientProperties, topic: str, start: Mapping[int, int], decoder: Decoder = decode
) -> Iterator[list[StoredRecord]]:
    """The committed records of the partitions that `start` names, from there on, for ever: what each poll brings.

    That is nothing every half second in which nothing comes. Raises UnknownTopic.
    """
    with _consumer(client) as consumer:
        _assign(consumer, topic, _ranges(consumer, topic, sorted(start)), start)
        while True:
            polled = consumer.poll(timeout_ms=POLL_MS).values()
            yield [_stored(record, decoder) for records in polled for record in records]


def last_records(
    client: ClientProperties, topic: str, count: int, partitions: Sequence[int] | None = None
) -> list[StoredRecord]:
    """The newest `count` records of `topic` by timestamp, the oldest first. Raises UnknownTopic.

    Markers of transactions take offsets too, so it looks further back until it has found enough or all there are.
    """
    back = 2 * count
    while True:
        found = list(read_topic(client, topic, start=StartOffset(back, from_end=True), partitions=partitions))
        ranges = partition_ranges(client, topic)
        if len(found) >= count or back >= max(held.end - held.beginning for held in ranges.values()):
            found.sort(key=lambda record: (record.timestamp, record.partition, record.offset))
            return found[len(found) - count :] if count < len(found) else found
        back *= 4


@contextlib.contextmanager
def _consumer(client: ClientProperties) -> Iterator[KafkaConsumer]:
    read_widely()
    consumer = KafkaConsumer(
        **client.consumer(
            group_id=None,
            enable_auto_commit=False,
            isolation_level="read_committed",
            auto_offset_reset="earliest",  # retention may take what was there a moment ago
            metrics_enabled=False,
            max_poll_records=MAX_POLL_RECORDS,
        )
    )
    try:
        yield consumer
    finally:
        consumer.close(autocommit=False)


def _ranges(consumer: KafkaConsumer, topic: str, partitions: Sequence[int] | None) -> dict[int, PartitionRange]:
    there = consumer.partitions_for_topic(topic) or set()
    if not there:
        raise UnknownTopic(f"there is no topic {topic}")
    if missing := sorted(set(partitions or ()) - there):
        raise UnknownTopic(f"{topic} has partitions {min(there)} to {max(there)}, but not {missing}")
    wanted = [TopicPartition(topic, number) for number in sorted(partitions or there)]
    first, last = consumer.beginning_offsets(wanted), consumer.end_offsets(wanted)
    return {each.partition: PartitionRange(first[each], max(first[each], last[each])) for each in wanted}


def _assign(
    consumer: KafkaConsumer, topic: str, ranges: Mapping[int, PartitionRange], start: StartOffset | Mapping[int, int]
) -> dict[int, TopicPartition]:
    """Let `consumer` read partitions of `topic` from `start` on; by number."""
    assigned = {number: TopicPartition(topic, number) for number in ranges}
    consumer.assign(list(assigned.values()))
    for number, held in ranges.items():
        first = start if isinstance(start, StartOffset) else StartOffset(start.get(number, held.beginning))
        consumer.seek(assigned[number], first.within(held.beginning, held.end))
    return assigned


def _edges(
    consumer: KafkaConsumer, topic: str, span: OffsetSpan, ranges: Mapping[int, PartitionRange]
) -> dict[int, tuple[int, int]]:
    """The first offset of `span` in each partition, and the one after its last."""

    def resolved(edge: Edge) -> dict[int, int]:
        times: dict[TopicPartition, Any] = {}
        if edge.of == "time":
            times = consumer.offsets_for_times({TopicPartition(topic, number): edge.number for number in ranges})
        found = {where.partition: at.offset if at else None for where, at in times.items()}
        return {number: edge.within(held.beginning, held.end, found.get(number)) for number, held in ranges.items()}

    first, last = resolved(span.first), resolved(span.last or Edge("end", 0))
    return {number: (first[number], max(first[number], last[number])) for number in ranges}


def _stored(record: ConsumerRecord, decoder: Decoder) -> StoredRecord:
    headers = tuple(record.headers)
    try:
        rows, error = tuple(decoder(record.value, headers)), None
    except UndecodableRecord as why:
        rows, error = (), str(why)
    return StoredRecord(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        timestamp=record.timestamp,
        key=record.key,
        headers=headers,
        size=len(record.value or b""),
        rows=rows,
        error=error,
    )
