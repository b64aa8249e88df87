"""Records of a topic some at a time, decoded together: what `laminar topics` looks through, without Beam."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby, islice, repeat
from typing import Any

import pyarrow as pa

from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import PartitionRange
from infra.kafka.reading import StoredRecord, read_batches
from infra.kafka.record_batches import Headers, RecordBatch
from operators.export.columns import RecordRows, as_table
from schemas.block import Block
from schemas.block_codec import Decoded, decode_all
from schemas.plain_columns import plain_rows
from schemas.topics import Topic

CHUNK = 1000
"""Records that are looked at together: memory is bounded by them, however long the topic."""
CHUNK_BYTES = 32 << 20
"""Fewer, where they are large."""
FIRST_CHUNKS = (32, 128, 512)
"""Fewer at first, so that something is told soon."""


@dataclass(frozen=True)
class LogChunk:
    """Records of one partition of `topic`, and what each holds: its rows, or why they are none of this topic's."""

    topic: Topic
    records: RecordBatch
    decoded: Decoded

    @cached_property
    def found(self) -> list[Block | str]:
        """Each record's rows, or why it has none."""
        return self.decoded.apart()

    @property
    def errors(self) -> list[str | None]:
        """Why each record has no rows; None where it has some."""
        return [each if isinstance(each, str) else None for each in self.decoded.held]

    def whose(self, kind: type) -> list[int]:
        """Which record each row of class `kind` is of, by number."""
        held = enumerate(self.decoded.held)
        return [at for at, each in held if not isinstance(each, str) and each[0] is kind for _ in range(each[1])]

    def table(self) -> pa.Table:
        """All rows, as `columns.row_schema` has them."""
        placed: list[RecordRows] = []
        taken: Counter[type] = Counter()
        rows = zip(self.decoded.held, self.records.offsets, self.records.timestamps, strict=True)
        for kind, run in groupby(rows, key=lambda row: None if isinstance(row[0], str) else row[0][0]):
            if kind is not None:
                held, offsets, timestamps = zip(*run, strict=True)
                counts = [count for _, count in held]
                block = self.decoded.blocks[kind].part(taken[kind], sum(counts))
                placed.append(RecordRows(block, offsets, timestamps, counts))
                taken[kind] += len(block)
        return as_table(self.topic, self.records.partition, placed)

    def plain(self) -> list[list[dict[str, Any]]]:
        """The rows of each record, JSON-ready; none where it could not be decoded."""
        made = {kind: iter(plain_rows(block)) for kind, block in self.decoded.blocks.items()}
        return [[] if isinstance(each, str) else list(islice(made[each[0]], each[1])) for each in self.decoded.held]


def read_chunks(
    client: ClientProperties,
    topic: Topic,
    name: str,
    ranges: Mapping[int, PartitionRange],
    *,
    follow: bool = False,
    wanted: Callable[[bytes | None, Headers], bool] | None = None,
) -> Iterator[LogChunk]:
    """The records of `topic`, by its full name, in `ranges`; as they come, for ever, when it is to `follow`.

    Only those are decoded whose value and headers are `wanted`.
    """
    waiting: dict[int, list[RecordBatch]] = {}
    sizes: Counter[int] = Counter()
    lengths, begun = chain(FIRST_CHUNKS, repeat(CHUNK)), False
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
            batch = batch.where(wanted)
        waiting.setdefault(number, []).append(batch)
        sizes[number] += len(batch) * (CHUNK_BYTES // CHUNK) + sum(map(len, filter(None, batch.values)))
        if follow or not begun or sizes.total() >= CHUNK_BYTES:
            yield from _chunks(topic, waiting.pop(number), lengths)
            del sizes[number]
            begun = True
    for _, gathered in sorted(waiting.items()):
        yield from _chunks(topic, gathered, lengths)


def chunks_of(topic: Topic, records: Iterable[StoredRecord]) -> Iterator[LogChunk]:
    """`records`, read by `undecoded`, in their order."""
    for number, found in groupby(records, key=lambda record: record.partition):
        rows = [(each.offset, each.timestamp, each.key, each.rows[0], each.headers) for each in found]
        yield decoded(topic, RecordBatch(number, *zip(*rows, strict=True)))


def decoded(topic: Topic, records: RecordBatch) -> LogChunk:
    """`records` with what they hold."""
    found = decode_all(records.values, records.headers)
    if strangers := found.blocks.keys() - set(topic.record_classes):
        why = {kind: f"a {kind.__name__} does not belong here" for kind in strangers}
        blocks = {kind: block for kind, block in found.blocks.items() if kind not in strangers}
        held = [each if isinstance(each, str) else why.get(each[0], each) for each in found.held]
        found = Decoded(blocks, held)
    return LogChunk(topic, records, found)


def _chunks(topic: Topic, gathered: list[RecordBatch], lengths: Iterator[int]) -> Iterator[LogChunk]:
    records, first = RecordBatch.joined(gathered), 0
    while first < len(records):
        after = first + next(lengths)
        yield decoded(topic, records.part(first, after))
        first = after
