"""Reads and decodes the records of a topic, for inspection and audits. Joins no group and commits nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kafka import KafkaConsumer, TopicPartition

from infra.kafka.consumers import open_consumer, warn_of_gap
from infra.kafka.offset_span import Edge
from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import PartitionRange, partition_ranges, ranges_of
from infra.kafka.record_batches import RecordBatch
from schemas.codec import Headers, UndecodableRecord, decode

T = TypeVar("T")
BEGINNING = Edge("beginning", 0)
POLL_MS = 500
ToRows = Callable[[bytes | None, Iterable[tuple[str, bytes]]], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """One record of a topic. `rows` are its decoded records; if they are empty, `error` says why.

    `timestamp` is in Unix milliseconds, `size` is that of the value in bytes (0 for a tombstone).
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
    transactional: bool = False
    """Whether it was written in a transaction, as the roles do."""

    @property
    def schema(self) -> str:
        """The schema in its headers, e.g. "Trajectory/2"; "" if there is none."""
        return schema_of(self.headers)


def schema_of(headers: Headers) -> str:
    """The schema in the headers of a record, e.g. "Trajectory/2"; "" if there is none."""
    return next((value.decode(errors="replace") for name, value in headers if name == "laminar-schema"), "")


def class_of(headers: Headers) -> str:
    """The record class in the headers of a record, of any version, e.g. "Trajectory"; "" if there is none."""
    return schema_of(headers).partition("/")[0]


def read_topic(
    client: ClientProperties,
    topic: str,
    *,
    start: Edge | Mapping[int, int] = BEGINNING,
    partitions: Sequence[int] | None = None,
    follow: bool = False,
    until: Mapping[int, int] | None = None,
    decoder: ToRows = decode,
) -> Iterator[StoredRecord]:
    """The committed records of `topic`, one by one, as in `read_batches`.

    `decoder` returns the `rows` of a value and its headers, or raises UndecodableRecord. Raises UnknownTopic.
    """
    for batch in read_batches(client, topic, start=start, partitions=partitions, follow=follow, until=until):
        yield from _stored_records(topic, batch, decoder)


def read_partition(
    client: ClientProperties, topic: str, partition: int, first: int, end: int | None = None, decoder: ToRows = decode
) -> Iterator[StoredRecord]:
    """As `read_topic`, the records of one partition from offset `first` to before `end`, by default to its end."""
    until = None if end is None else {partition: end}
    return read_topic(client, topic, start={partition: first}, partitions=[partition], until=until, decoder=decoder)


def read_rows(
    client: ClientProperties, topic: str, kind: type[T], start: Edge | Mapping[int, int] = BEGINNING
) -> Iterator[T]:
    """The rows of class `kind` in `topic`, as in `read_topic`; all others are left out."""
    return (row for record in read_topic(client, topic, start=start) for row in record.rows if isinstance(row, kind))


def read_batches(
    client: ClientProperties,
    topic: str,
    *,
    start: Edge | Mapping[int, int] = BEGINNING,
    partitions: Sequence[int] | None = None,
    follow: bool = False,
    until: Mapping[int, int] | None = None,
) -> Iterator[RecordBatch]:
    """The committed records of `topic` from `start` to its present end; with `follow`, without end.

    `start` may be given by partition, and is no time. `until` gives the end by partition. In order within
    each partition; memory does not grow with the number of records. Deleted records at an offset that `start` gives, or
    at the next one, are skipped with a warning; offset 0 stands for the beginning. Raises UnknownTopic.
    """
    with open_consumer(client) as consumer:
        ranges = ranges_of(consumer, topic, partitions)
        for number, end in (until or {}).items():
            if number in ranges:
                ranges[number] = PartitionRange(ranges[number].beginning, end)
        yield from _batches(consumer, topic, ranges, start, follow)


def follow_topic(
    client: ClientProperties, topic: str, start: Mapping[int, int], decoder: ToRows = decode
) -> Iterator[list[StoredRecord]]:
    """The committed records of the partitions in `start`, from these offsets on, without end: one list per poll.

    The list is empty if no record arrives within half a second. Raises UnknownTopic.
    """
    with open_consumer(client) as consumer:
        _assign(consumer, topic, ranges_of(consumer, topic, sorted(start)), start)
        while True:
            polled = consumer.poll(timeout_ms=POLL_MS).values()
            yield [
                each
                for records in polled
                for record in records
                for each in _stored_records(topic, record.value, decoder)
            ]


def last_records(
    client: ClientProperties,
    topic: str,
    count: int,
    partitions: Sequence[int] | None = None,
    decoder: ToRows = decode,
) -> list[StoredRecord]:
    """The newest `count` records of `topic` by timestamp, the oldest first, as in `read_topic`. Raises UnknownTopic.

    Transaction markers take offsets too, so it reads further back until it has enough records, or all.
    """
    with open_consumer(client) as consumer:
        ranges = ranges_of(consumer, topic, partitions)
        back = 2 * count
        while True:
            batches = _batches(consumer, topic, ranges, Edge("end", back))
            found = [record for batch in batches for record in _stored_records(topic, batch, decoder)]
            if len(found) >= count or back >= max(held.end - held.beginning for held in ranges.values()):
                found.sort(key=lambda record: (record.timestamp, record.partition, record.offset))
                return found[len(found) - count :] if count < len(found) else found
            back *= 4


def last_of_each_key(client: ClientProperties, topic: str, count: int, milliseconds: int) -> list[StoredRecord]:
    """Of the newest `count` records of `topic`, those at most `milliseconds` older than the last one of their key.

    The oldest first; only they are decoded. Raises UnknownTopic.
    """
    found = last_records(client, topic, count, decoder=raw_decoder)
    last = {record.key: record.timestamp for record in found}
    return decode_stored([record for record in found if record.timestamp >= last[record.key] - milliseconds])


def decode_stored(records: Iterable[StoredRecord]) -> list[StoredRecord]:
    """Decode `records` that were read with `raw_decoder`."""
    held = [(record, *_rows(record.rows[0], record.headers, decode)) for record in records]
    return [replace(record, rows=rows, error=error) for record, rows, error in held]


def raw_decoder(value: bytes | None, headers: Any) -> Sequence[bytes | None]:
    """A decoder that returns the raw value, so that it can be decoded later or together with others."""
    return (value,)


def _batches(
    consumer: KafkaConsumer,
    topic: str,
    ranges: Mapping[int, PartitionRange],
    start: Edge | Mapping[int, int],
    follow: bool = False,
) -> Iterator[RecordBatch]:
    """The records of `ranges` from `start` on; with `follow`, also all later ones."""
    assigned = _assign(consumer, topic, ranges, start)
    # A position passes transaction markers too, so it reaches the end even if no record is there.
    while follow or any(consumer.position(assigned[number]) < held.end for number, held in ranges.items()):
        for records in consumer.poll(timeout_ms=POLL_MS).values():
            for record in records:
                batch = record.value.between(0, None if follow else ranges[record.partition].end)
                if len(batch):
                    yield batch


def _assign(
    consumer: KafkaConsumer, topic: str, ranges: Mapping[int, PartitionRange], start: Edge | Mapping[int, int]
) -> dict[int, TopicPartition]:
    """Assign partitions of `topic` to `consumer`, from `start` on; return them by number."""
    assigned = {number: TopicPartition(topic, number) for number in ranges}
    consumer.assign(list(assigned.values()))
    for number, held in ranges.items():
        first = start if isinstance(start, Edge) else Edge("offset", start.get(number, held.beginning))
        offset = first.within(held.beginning, held.end)
        if first.is_before(offset):
            warn_of_gap(assigned[number], first.number, offset)
        consumer.seek(assigned[number], offset)
    return assigned


def _stored_records(topic: str, batch: RecordBatch, decoder: ToRows) -> Iterator[StoredRecord]:
    columns = (batch.offsets, batch.timestamps, batch.keys, batch.values, batch.headers)
    for offset, timestamp, key, value, headers in zip(*columns, strict=True):
        rows, error = _rows(value, headers, decoder)
        size = len(value or b"")
        yield StoredRecord(
            topic, batch.partition, offset, timestamp, key, headers, size, rows, error, batch.transactional
        )


def _rows(value: bytes | None, headers: Headers, decoder: ToRows) -> tuple[tuple[Any, ...], str | None]:
    """The rows of a value, or the error."""
    try:
        return tuple(decoder(value, headers)), None
    except UndecodableRecord as error:
        return (), str(error)


Measure = Callable[[bytes | None, Headers], int | None]
"""Returns the number of a record, from its value and headers; None if it has none."""


def first_offset(client: ClientProperties, topic: str, partition: int, measure: Measure, wanted: int) -> int | None:
    """The offset of the first record with number `wanted` or more; None if there is none. Raises UnknownTopic."""
    held = partition_ranges(client, topic)[partition]
    where = TopicPartition(topic, partition)
    low, high, found = held.beginning, held.end, held.end
    with open_consumer(client) as consumer:
        consumer.assign([where])

        def first_number(offset: int) -> tuple[int, int] | None:
            """Offset and number of the first record from `offset` on that has a number."""
            consumer.seek(where, offset)
            while consumer.position(where) < held.end:
                for records in consumer.poll(timeout_ms=POLL_MS).values():
                    for record in records:
                        batch = record.value
                        for at, value, headers in zip(batch.offsets, batch.values, batch.headers, strict=True):
                            if at >= offset and (number := measure(value, headers)) is not None:
                                return at, number
            return None

        while low < high:
            middle = (low + high) // 2
            seen = first_number(middle)
            if seen is not None and seen[1] < wanted:
                low = seen[0] + 1
            else:
                high = middle
                found = seen[0] if seen is not None else found
    return found if found < held.end else None
