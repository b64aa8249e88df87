"""Reads the rows of an export part from the log again, without a consumer group."""

from __future__ import annotations

import pyarrow as pa

from infra.kafka.properties import ClientProperties
from infra.kafka.start_offset import StartOffset
from infra.kafka.topic_reader import read_topic
from operators.export.columns import RecordRows, as_table
from operators.export.config import Contents
from operators.export.folder import ExportPart
from operators.export.verify import LogRows
from schemas.block_codec import decode_as_blocks


def log_rows_reader(client: ClientProperties) -> LogRows:
    """The function with which `verify` reads the log at `client`."""

    def read(contents: Contents, part: ExportPart) -> tuple[pa.Table, list[int]]:
        topic = contents.source
        records = read_topic(
            client,
            topic.name(contents.run),
            start=StartOffset(part.first),
            partitions=[part.partition],
            until={part.partition: part.last + 1},
            decoder=decode_as_blocks,
        )
        placed, undecodable = [], []
        for record in records:
            if record.error is not None or record.rows[0].kind not in topic.record_classes:
                undecodable.append(record.offset)
            else:
                placed.append(RecordRows.of_one(record.rows[0], record.offset, record.timestamp))
        return as_table(topic, part.partition, placed), undecodable

    return read
