"""Records of a topic as tables, some at a time: what `laminar topics find` and `stats` look through, without Beam."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa

from infra.kafka.properties import ClientProperties
from infra.kafka.reading import PartitionRange, StoredRecord, read_topic
from operators.export.columns import Placed, as_table
from schemas.codec import decode_as_block
from schemas.topics import Topic

CHUNK = 1000
"""Records that are looked at together: memory is bounded by them, however long the topic."""


class Chunk(NamedTuple):
    """Records of one partition: `rows` are those of all that could be decoded."""

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
        decoder=lambda value, headers: (decode_as_block(value, headers),),
    )
    for record in records:
        gathered = waiting.setdefault(record.partition, [])
        gathered.append(record)
        if follow or len(gathered) == CHUNK:
            yield _chunk(topic, waiting.pop(record.partition))
    for _, gathered in sorted(waiting.items()):
        yield _chunk(topic, gathered)


def _chunk(topic: Topic, records: Sequence[StoredRecord]) -> Chunk:
    placed = [
        Placed(record.rows[0], record.offset, record.timestamp)
        for record in records
        if record.rows and record.rows[0].kind in topic.records
    ]
    return Chunk(records, as_table(topic, records[0].partition, placed))
