"""Records of a topic as tables, some at a time: what `laminar topics find` and `stats` look through, without Beam."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import pyarrow as pa

from infra.kafka.properties import ClientProperties
from infra.kafka.reading import PartitionRange, StoredRecord, read_topic
from operators.export.columns import Placed, as_table
from schemas.block import Block
from schemas.codec import decode_all
from schemas.topics import Topic

CHUNK = 1000
"""Records that are looked at together: memory is bounded by them, however long the topic."""


class Chunk(NamedTuple):
    """Records of one partition: `rows` are those of all that could be decoded; the others say why not."""

    records: Sequence[StoredRecord]
    rows: pa.Table


def read_chunks(
    client: ClientProperties, topic: Topic, name: str, ranges: Mapping[int, PartitionRange], *, follow: bool = False
) -> Iterator[Chunk]:
    """The records of `topic`, by its full name, in `ranges`; one at a time, for ever, when it is to `follow`."""
    waiting: dict[int, list[StoredRecord]] = {}
    records = read_topic(
        client,
        name,
        start={number: held.beginning for number, held in ranges.items()},
        partitions=sorted(ranges),
        until={number: held.end for number, held in ranges.items()},
        follow=follow,
        decoder=lambda value, headers: (value,),  # decoded a chunk at a time
    )
    for record in records:
        gathered = waiting.setdefault(record.partition, [])
        gathered.append(record)
        if follow or len(gathered) == CHUNK:
            yield _chunk(topic, waiting.pop(record.partition))
    for _, gathered in sorted(waiting.items()):
        yield _chunk(topic, gathered)


def _chunk(topic: Topic, records: Sequence[StoredRecord]) -> Chunk:
    told, placed = list(records), []
    for at, found in enumerate(decode_all([(record.rows[0], record.headers) for record in records])):
        record = records[at]
        if isinstance(found, Block) and found.kind in topic.records:
            placed.append(Placed(found, record.offset, record.timestamp))
        else:
            why = f"a {found.kind.__name__} does not belong here" if isinstance(found, Block) else str(found)
            told[at] = replace(record, rows=(), error=why)
    return Chunk(told, as_table(topic, records[0].partition, placed))
