"""Records of a topic as they stand there, decoded: for people and audits. No group is joined, nothing is committed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kafka import KafkaConsumer, TopicPartition

from infra.kafka.offset_span import Edge, OffsetSpan
from infra.kafka.properties import ClientProperties
from infra.kafka.record_batches import Headers, RecordBatch, take_whole_batches
from infra.kafka.start_offset import BEGINNING, StartOffset
from infra.kafka.wide_reads import read_widely
from schemas.codec import UndecodableRecord, decode

POLL_MS = 500
MAX_POLL_BATCHES = 16
"""What one poll takes apart: a batch is as its producer sent it, at most some megabytes."""
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
        return schema_of(self.headers)


def schema_of(headers: Headers) -> str:
    """What a record with these headers says it is, e.g. "Trajectory/1"; "" where it does not say."""
    return next((value.decode(errors="replace") for name, value in headers if name == "laminar-schema"), "")


@dataclass(frozen=True, slots=True)
class PartitionRange:
    """What one partition holds for a read_committed reader: offsets `beginning` up to, but not including, `end`."""

    beginning: int
    end: int


def partition_ranges(client: ClientProperties, topic: str) -> dict[int, PartitionRange]:
    """What each partition of `topic` holds. Raises UnknownTopic."""
    with consumer_of(client) as consumer:
        return _ranges(consumer, topic, None)


def resolve_span(
    client: ClientProperties, topic: str, span: OffsetSpan, partitions: Sequence[int] | None = None
) -> dict[int, PartitionRange]:
    """What `span` is in each partition of `topic`. Raises UnknownTopic."""
    with consumer_of(client) as consumer:
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
    """The committed records of `topic`, one by one, as `read_batches` has them.

    `decoder` gives a record's `rows` of its value and headers, or raises UndecodableRecord. Raises UnknownTopic.
    """
    for batch in read_batches(client, topic, start=start, partitions=partitions, follow=follow, until=until):
        yield from _stored(topic, batch, decoder)


def read_batches(
    client: ClientProperties,
    topic: str,
    *,
    start: StartOffset | Mapping[int, int] = BEGINNING,
    partitions: Sequence[int] | None = None,
    follow: bool = False,
    until: Mapping[int, int] | None = None,
) -> Iterator[RecordBatch]:
    """The committed records of `topic` from `start` to its end as of now, or for ever when it is to `follow`.

    `start` may give each partition's. `until` gives the end of each partition where it is not to be that of now. In
    order within each partition; memory does not grow with what is read. Raises UnknownTopic.
    """
    with consumer_of(client) as consumer:
        ranges = _ranges(consumer, topic, partitions)
        for number, end in (until or {}).items():
            if number in ranges:
                ranges[number] = PartitionRange(ranges[number].beginning, end)
        assigned = _assign(consumer, topic, ranges, start)
        # A position passes the markers of transactions too, so it reaches the end where no record stands.
        while follow or any(consumer.position(assigned[number]) < held.end for number, held in ranges.items()):
            for records in consumer.poll(timeout_ms=POLL_MS).values():
                for record in records:
                    batch = record.value.between(0, None if follow else ranges[record.partition].end)
                    if len(batch):
                        yield batch


def follow_topic(
    client: ClientProperties, topic: str, start: Mapping[int, int], decoder: Decoder = decode
) -> Iterator[list[StoredRecord]]:
    """The committed records of the partitions that `start` names, from there on, for ever: what each poll brings.

    That is nothing every half second in which nothing comes. Raises UnknownTopic.
    """
    with consumer_of(client) as consumer:
        _assign(consumer, topic, _ranges(consumer, topic, sorted(start)), start)
        while True:
            polled = consumer.poll(timeout_ms=POLL_MS).values()
            yield [each for records in polled for record in records for each in _stored(topic, record.value, decoder)]


def last_records(
    client: ClientProperties,
    topic: str,
    count: int,
    partitions: Sequence[int] | None = None,
    decoder: Decoder = decode,
) -> list[StoredRecord]:
    """The newest `count` records of `topic` by timestamp, the oldest first; as `read_topic`. Raises UnknownTopic.

    Markers of transactions take offsets too, so it looks further back until it has found enough or all there are.
    """
    back = 2 * count
    while True:
        start = StartOffset(back, from_end=True)
        found = list(read_topic(client, topic, start=start, partitions=partitions, decoder=decoder))
        ranges = partition_ranges(client, topic)
        if len(found) >= count or back >= max(held.end - held.beginning for held in ranges.values()):
            found.sort(key=lambda record: (record.timestamp, record.partition, record.offset))
            return found[len(found) - count :] if count < len(found) else found
        back *= 4


@contextlib.contextmanager
def consumer_of(client: ClientProperties) -> Iterator[KafkaConsumer]:
    """A consumer of committed records, in whole batches, that joins no group and commits nothing."""
    read_widely()
    consumer = KafkaConsumer(
        **client.consumer(
            group_id=None,
            enable_auto_commit=False,
            isolation_level="read_committed",
            auto_offset_reset="earliest",  # retention may take what was there a moment ago
            metrics_enabled=False,
            max_poll_records=MAX_POLL_BATCHES,
        )
    )
    take_whole_batches(consumer)
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


def _stored(topic: str, batch: RecordBatch, decoder: Decoder) -> Iterator[StoredRecord]:
    columns = (batch.offsets, batch.timestamps, batch.keys, batch.values, batch.headers)
    for offset, timestamp, key, value, headers in zip(*columns, strict=True):
        try:
            rows, error = tuple(decoder(value, headers)), None
        except UndecodableRecord as why:
            rows, error = (), str(why)
        size = len(value or b"")
        yield StoredRecord(topic, batch.partition, offset, timestamp, key, headers, size, rows, error)
