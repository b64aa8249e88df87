"""Reads selected columns of a topic, row by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import UnknownTopic, partition_ranges
from pipelines.inspect.log.chunks import read_chunks
from schemas.topics import Topic


def rows_of(client: ClientProperties, run: str, topic: Topic, columns: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """`columns` (of `columns.row_schema`) of all rows of `topic`; no rows if the run has no such topic."""
    name = topic.name(run)
    try:
        ranges = partition_ranges(client, name)
    except UnknownTopic:
        return
    for chunk in read_chunks(client, topic, name, ranges):
        yield from chunk.table().select(list(columns)).to_pylist()
