"""An export of the log of a stopped broker: the step of the export pipeline over the broker's files, without Beam.

There is no consumer group to commit to, so `laminar runs trim` does not wait for such an export.
"""

from __future__ import annotations

import time
from itertools import islice

from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import partition_ranges
from infra.kafka.topic_reader import StoredRecord, read_topic
from operators.export.config import ExportConfig
from operators.export.export_topic import ExportTopic, StartPositions
from operators.io.elements import PartitionKey, Polled, ReceivedRecord, Restored
from schemas.block import Block
from schemas.block_codec import decode_as_blocks
from schemas.records import DeadLetter

MAX_POLLED = 256
"""Records in one fold."""


def export_stored(config: ExportConfig, client: ClientProperties) -> None:
    """Export all that the stopped log of `client` has of the topic of `config`. Raises ExportError."""
    topic = config.contents.source
    name = topic.name(config.contents.run)
    positions = dict(StartPositions(config, client)())
    exporting = ExportTopic(config).restore(Restored("", 0, (), {}, positions))
    try:
        for key, first in list(positions.items()):
            records = read_topic(
                client,
                name,
                start={key.partition: first},
                partitions=[key.partition],
                decoder=decode_as_blocks,
            )
            while some := tuple(islice(records, MAX_POLLED)):
                positions[key] = some[-1].offset + 1
                exporting.fold(_polled(config, key, some, positions))
        ends = {
            PartitionKey(topic.short_name, number): held.end for number, held in partition_ranges(client, name).items()
        }
        exporting.fold(Polled("", 0, (), (), ends, caught_up=True, last=True))
    finally:
        exporting.close()


def _polled(
    config: ExportConfig, key: PartitionKey, records: tuple[StoredRecord, ...], positions: dict[PartitionKey, int]
) -> Polled:
    received, rejected = [], []
    for each in records:
        block: Block | None = None if each.error is not None else each.rows[0]
        if block is not None and block.kind in config.contents.source.record_classes:
            received.append(ReceivedRecord(key.topic, key.partition, each.offset, block, each.timestamp))
        else:
            why = each.error or f"a {block.kind.__name__ if block else 'record'} does not belong on {key.topic}"
            now = time.time_ns() // 10**6
            rejected.append(DeadLetter(f"read {key.topic}", why, key.topic, key.partition, each.offset, b"", now))
    return Polled("", 0, tuple(received), tuple(rejected), dict(positions), caught_up=False)
