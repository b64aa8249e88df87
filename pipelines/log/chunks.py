"""Records of a topic some at a time, decoded together: what `laminar topics` looks through, without Beam."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pyarrow as pa

from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import PartitionRange
from infra.kafka.reading import StoredRecord, read_batches
from infra.kafka.record_batches import RecordBatch
from operators.export.columns import Placed, as_table
from schemas.block import Block
from schemas.codec import decode_all
from schemas.plain_columns import plain_rows
from schemas.topics import Topic

CHUNK = 1000
"""Records that are looked at together: memory is bounded by them, however long the topic."""
CHUNK_BYTES = 32 << 20
"""Fewer, where they are large."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Records of one partition of `topic`, and for each its rows, or why they are none of this topic's."""

    topic: Topic
    records: RecordBatch
    found: list[Block | str]

    def table(self) -> pa.Table:
        """All rows, as `columns.row_schema` has them."""
        placed = [
            Placed(block, offset, timestamp)
            for block, offset, timestamp in zip(self.found, self.records.offsets, self.records.timestamps, strict=True)
            if isinstance(block, Block)
        ]
        return as_table(self.topic, self.records.partition, placed)

    def plain(self) -> list[list[dict[str, Any]]]:
        """The rows of each record, JSON-ready; none where it could not be decoded."""
        kinds: dict[type, list[int]] = {}
        for at, block in enumerate(self.found):
            if isinstance(block, Block):
                kinds.setdefault(block.kind, []).append(at)
        rows: list[list[dict[str, Any]]] = [[] for _ in self.found]
        for members in kinds.values():
            blocks = [block for at in members if isinstance(block := self.found[at], Block)]
            made = iter(plain_rows(Block.concatenated(blocks)))
            for at, block in zip(members, blocks, strict=True):
                rows[at] = [next(made) for _ in range(len(block))]
        return rows


def read_chunks(
    client: ClientProperties, topic: Topic, name: str, ranges: Mapping[int, PartitionRange], *, follow: bool = False
) -> Iterator[Chunk]:
    """The records of `topic`, by its full name, in `ranges`; as they come, for ever, when it is to `follow`."""
    waiting: dict[int, list[RecordBatch]] = {}
    sizes: Counter[int] = Counter()
    for batch in read_batches(
        client,
        name,
        start={number: held.beginning for number, held in ranges.items()},
        partitions=sorted(ranges),
        until={number: held.end for number, held in ranges.items()},
        follow=follow,
    ):
        number = batch.partition
        waiting.setdefault(number, []).append(batch)
        sizes[number] += len(batch) * (CHUNK_BYTES // CHUNK) + sum(map(len, filter(None, batch.values)))
        if follow or sizes.total() >= CHUNK_BYTES:
            yield from _chunks(topic, waiting.pop(number))
            del sizes[number]
    for _, gathered in sorted(waiting.items()):
        yield from _chunks(topic, gathered)


def chunks_of(topic: Topic, records: Iterable[StoredRecord]) -> Iterator[Chunk]:
    """`records`, read by `undecoded`, in their order."""
    for number, found in groupby(records, key=lambda record: record.partition):
        rows = [(each.offset, each.timestamp, each.key, each.rows[0], each.headers) for each in found]
        yield decoded(topic, RecordBatch(number, *zip(*rows, strict=True)))


def undecoded(value: bytes | None, headers: Any) -> Sequence[bytes | None]:
    """A decoder that leaves a value as it is, so that many can be decoded together."""
    return (value,)


def decoded(topic: Topic, records: RecordBatch) -> Chunk:
    """`records` with what they hold."""
    found: list[Block | str] = []
    for each in decode_all(list(zip(records.values, records.headers, strict=True))):
        if not isinstance(each, Block):
            found.append(str(each))
        elif each.kind not in topic.records:
            found.append(f"a {each.kind.__name__} does not belong here")
        else:
            found.append(each)
    return Chunk(topic, records, found)


def _chunks(topic: Topic, gathered: list[RecordBatch]) -> Iterator[Chunk]:
    records = RecordBatch.joined(gathered)
    for first in range(0, len(records), CHUNK):
        yield decoded(topic, records.part(first, first + CHUNK))
