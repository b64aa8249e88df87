"""Reads the outputs of a shard back, up to their ends at its start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kafka import TopicPartition
from kafka.consumer.fetcher import ConsumerRecord
from kafka.errors import KafkaTimeoutError

POLL_MS = 20
"""Short, since a topic ends with a transaction marker, which no poll returns."""


def read_committed(
    consumer: Any,
    begins: Mapping[TopicPartition, int],
    ends: Mapping[TopicPartition, int],
    position: Callable[[TopicPartition], int],
    clock: Callable[[], float],
    patience_s: float,
    check: Callable[[ConsumerRecord], None] | None = None,
) -> list[ConsumerRecord]:
    """The committed records from `begins` to `ends`, or a little beyond; each is passed to `check`.

    `consumer` has the partitions; `position` is its next offset, `clock` monotonic seconds. Raises KafkaTimeoutError
    without progress for `patience_s` seconds, and what `check` raises.
    """
    for place, offset in begins.items():
        consumer.seek(place, offset)
    records: list[ConsumerRecord] = []
    before, moved_at = -1, clock()
    while any(position(place) < end for place, end in ends.items()):
        for polled in consumer.poll(timeout_ms=POLL_MS).values():
            if check is not None:
                for record in polled:
                    check(record)
            records.extend(polled)
        if (now := sum(map(position, ends))) != before:
            before, moved_at = now, clock()
        elif clock() - moved_at > patience_s:
            hidden = ", ".join(f"{p.topic}:{p.partition} to {end}" for p, end in ends.items() if position(p) < end)
            raise KafkaTimeoutError(
                f"the outputs of this shard cannot be read ({hidden}): if a transaction is open there, `laminar topics "
                "transactions list` shows it, `abort` ends it"
            )
    return records
