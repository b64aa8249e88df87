"""Bisection of a partition by a number that rises from record to record, instead of a full read."""

from __future__ import annotations

from collections.abc import Callable

from kafka import TopicPartition

from infra.kafka.consumers import open_consumer
from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import partition_ranges
from infra.kafka.record_batches import Headers
from infra.kafka.topic_reader import POLL_MS

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
