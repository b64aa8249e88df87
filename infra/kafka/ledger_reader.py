"""Reads the outputs of a shard back, up to their ends at its start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    check: Callable[[ConsumerRecord], None] | None,
    blocking: Callable[[Sequence[TopicPartition]], Sequence[str]],
) -> list[ConsumerRecord]:
    """The committed records from `begins` to `ends`, or a little beyond; each is passed to `check`.

    `consumer` has the partitions; `position` is its next offset, `clock` monotonic seconds. Raises KafkaTimeoutError
    without progress for `patience_s` seconds, with what `blocking` finds in the partitions, and what `check` raises.
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
            hidden = {place: end for place, end in ends.items() if position(place) < end}
            places = ", ".join(f"{place.topic}:{place.partition} to {end}" for place, end in hidden.items())
            reason = "; ".join(blocking(list(hidden))) or "no transaction is open there now, so the next start may"
            raise KafkaTimeoutError(f"the outputs of this shard cannot be read ({places}): {reason}")
    return records
