"""Reads and decodes the records of a topic in chunks, without Beam."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby, islice, repeat
from typing import Any

import pyarrow as pa

from infra.kafka.offset_span import Edge, OffsetSpan
from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import PartitionRange, UnknownTopic, resolve_span
from infra.kafka.record_batches import RecordBatch
from infra.kafka.topic_reader import StoredRecord, read_batches
from operators.export.columns import RecordRows, as_table
from schemas.block import Block
from schemas.block_codec import Decoded, decode_all
from schemas.codec import Headers
from schemas.plain import plain_rows
from schemas.topics import Topic

CHUNK = 1000
"""Records per chunk: they bound the memory, for topics of any length."""
CHUNK_BYTES = 32 << 20
"""A chunk of large records has fewer."""
FIRST_CHUNKS = (32, 128, 512)
"""The first chunks are smaller, for an early first output."""


@dataclass(frozen=True)
class LogChunk:
    """Records of one partition of `topic`, each decoded to rows or an error."""

    topic: Topic
    records: RecordBatch
    decoded: Decoded

    @cached_property
    def decoded_records(self) -> list[Block | str]:
        """Each record's rows, or its error."""
        return self.decoded.per_value()

    @property
    def errors(self) -> list[str | None]:
        """Each record's error; None if it has rows."""
        return [each if isinstance(each, str) else None for each in self.decoded.contents]

    def record_numbers(self, kind: type) -> list[int]:
        """The record number of each row of class `kind`."""
        held = enumerate(self.decoded.contents)
        return [at for at, each in held if not isinstance(each, str) and each[0] is kind for _ in range(each[1])]

    def table(self) -> pa.Table:
        """All rows, in the schema `columns.row_schema`."""
        parts: list[RecordRows] = []
        taken: Counter[type] = Counter()
        rows = zip(self.decoded.contents, self.records.offsets, self.records.timestamps, strict=True)
        for kind, run in groupby(rows, key=lambda row: None if isinstance(row[0], str) else row[0][0]):
            if kind is not None:
                held, offsets, timestamps = zip(*run, strict=True)
                counts = [count for _, count in held]
                block = self.decoded.blocks[kind].slice(taken[kind], sum(counts))
                parts.append(RecordRows(block, offsets, timestamps, counts))
                taken[kind] += len(block)
        return as_table(self.topic, self.records.partition, parts)

    def plain(self) -> list[list[dict[str, Any]]]:
        """The rows of each record, JSON-ready; none if it could not be decoded."""
        rows = {kind: iter(plain_rows(block)) for kind, block in self.decoded.blocks.items()}
        return [[] if isinstance(each, str) else list(islice(rows[each[0]], each[1])) for each in self.decoded.contents]


def read_chunks(
    client: ClientProperties,
    topic: Topic,
    name: str,
    ranges: Mapping[int, PartitionRange],
    *,
    follow: bool = False,
    wanted: Callable[[bytes | None, Headers], bool] | None = None,
) -> Iterator[LogChunk]:
    """Read the records of `topic` (full topic name: `name`) in `ranges`; with `follow`, wait for new ones forever.

    Only records whose value and headers satisfy `wanted` are decoded.
    """
    pending: dict[int, list[RecordBatch]] = {}
    sizes: Counter[int] = Counter()
    lengths, has_yielded = chain(FIRST_CHUNKS, repeat(CHUNK)), False
    for batch in read_batches(
        client,
        name,
        start={number: held.beginning for number, held in ranges.items()},
        partitions=sorted(ranges),
        until={number: held.end for number, held in ranges.items()},
        follow=follow,
    ):
        number = batch.partition
        if wanted is not None:
            batch = batch.filter(wanted)
        pending.setdefault(number, []).append(batch)
        sizes[number] += len(batch) * (CHUNK_BYTES // CHUNK) + sum(map(len, filter(None, batch.values)))
        if follow or not has_yielded or sizes.total() >= CHUNK_BYTES:
            yield from _split(topic, pending.pop(number), lengths)
            del sizes[number]
            has_yielded = True
    for _, batches in sorted(pending.items()):
        yield from _split(topic, batches, lengths)


def chunks_of(topic: Topic, records: Iterable[StoredRecord]) -> Iterator[LogChunk]:
    """Chunks of `records`, which were read with `undecoded`, in their order."""
    for number, group in groupby(records, key=lambda record: record.partition):
        rows = [(each.offset, each.timestamp, each.key, each.rows[0], each.headers) for each in group]
        yield decoded(topic, RecordBatch(number, *zip(*rows, strict=True)))


def decoded(topic: Topic, records: RecordBatch) -> LogChunk:
    """Decode `records`."""
    results = decode_all(records.values, records.headers)
    if foreign := results.blocks.keys() - set(topic.record_classes):
        errors = {kind: f"{kind.__name__} is not a record type of this topic" for kind in foreign}
        blocks = {kind: block for kind, block in results.blocks.items() if kind not in foreign}
        held = [each if isinstance(each, str) else errors.get(each[0], each) for each in results.contents]
        results = Decoded(blocks, held)
    return LogChunk(topic, records, results)


def _split(topic: Topic, batches: list[RecordBatch], lengths: Iterator[int]) -> Iterator[LogChunk]:
    records, first = RecordBatch.concat(batches), 0
    while first < len(records):
        after = first + next(lengths)
        yield decoded(topic, records.slice(first, after))
        first = after


def rows_of(
    client: ClientProperties, run: str, topic: Topic, columns: Sequence[str], since_ms: int = 0
) -> Iterator[Mapping[str, Any]]:
    """`columns` (of `columns.row_schema`) of all rows of `topic`; no rows if the run has no such topic.

    With `since_ms` only those of records with this Unix time or a later one.
    """
    name = topic.name(run)
    try:
        ranges = resolve_span(client, name, OffsetSpan(Edge("time", since_ms), None))
    except UnknownTopic:
        return
    for chunk in read_chunks(client, topic, name, ranges):
        yield from chunk.table().select(list(columns)).to_pylist()
