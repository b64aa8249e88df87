"""Offset ranges of the partitions of a topic, and of a requested span. Joins no group and commits nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kafka import KafkaConsumer, TopicPartition

from infra.kafka.consumers import open_consumer, warn_of_gap
from infra.kafka.offset_span import Edge, OffsetSpan
from infra.kafka.properties import ClientProperties
from infra.kafka.record_batches import known_partitions


class UnknownTopic(RuntimeError):
    """The topic, or a requested partition, does not exist."""


@dataclass(frozen=True, slots=True)
class PartitionRange:
    """The offsets of one partition for a read_committed reader: from `beginning` to before `end`."""

    beginning: int
    end: int


def partition_ranges(client: ClientProperties, topic: str) -> dict[int, PartitionRange]:
    """The range of each partition of `topic`. Raises UnknownTopic."""
    with open_consumer(client) as consumer:
        return ranges_of(consumer, topic, None)


def resolve_span(
    client: ClientProperties, topic: str, span: OffsetSpan, partitions: Sequence[int] | None = None
) -> dict[int, PartitionRange]:
    """The range of `span` in each partition of `topic`; if it begins at deleted records, with a warning.

    Raises UnknownTopic.
    """
    with open_consumer(client) as consumer:
        ranges = ranges_of(consumer, topic, partitions)
        return {number: PartitionRange(*edges) for number, edges in _edges(consumer, topic, span, ranges).items()}


def ranges_of(consumer: KafkaConsumer, topic: str, partitions: Sequence[int] | None) -> dict[int, PartitionRange]:
    """The ranges of partitions of `topic`, by default of all. Raises UnknownTopic."""
    existing = known_partitions(consumer, topic)
    if not existing:
        raise UnknownTopic(f"there is no topic {topic}")
    if missing := sorted(set(partitions or ()) - existing):
        raise UnknownTopic(f"{topic} has partitions {min(existing)} to {max(existing)}, but not {missing}")
    wanted = [TopicPartition(topic, number) for number in sorted(partitions or existing)]
    first, last = consumer.beginning_offsets(wanted), consumer.end_offsets(wanted)
    return {each.partition: PartitionRange(first[each], max(first[each], last[each])) for each in wanted}


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
    for number, offset in first.items():
        if span.first.is_before(offset):
            warn_of_gap(TopicPartition(topic, number), span.first.number, offset)
    return {number: (first[number], max(first[number], last[number])) for number in ranges}
