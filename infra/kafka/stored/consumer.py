"""A consumer of the log of a stopped broker: the methods of a KafkaConsumer that readers use."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kafka import TopicPartition
from kafka.structs import OffsetAndTimestamp

from infra.kafka.record_batches import RecordBatch, read_batch
from infra.kafka.stored.log import stored_log
from infra.kafka.stored.partition import StoredPartition
from schemas.codec import Headers

MAX_POLL_BATCHES = 16


@dataclass(frozen=True, slots=True)
class PolledBatch:
    """A batch as a consumer's poll returns it; `offset` is that of its last record."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    value: RecordBatch


class StoredConsumer:
    """Reads the committed records in the folder `log`. The end is that of the log when it was indexed."""

    def __init__(self, log: Path, max_poll_batches: int = MAX_POLL_BATCHES) -> None:
        self._log, self._max_poll_batches = stored_log(log), max_poll_batches
        self._assigned: list[TopicPartition] = []
        self._positions: dict[TopicPartition, int] = {}
        self._reading: dict[TopicPartition, Iterator[tuple[int, Any]]] = {}
        self._known: dict[bytes, Headers] = {}

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        return set(self._log.numbers(topic)) or None

    def beginning_offsets(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return {place: self._partition(place).beginning for place in places}

    def end_offsets(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return {place: self._partition(place).end for place in places}

    def offsets_for_times(self, times: Mapping[TopicPartition, int]) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        found = {place: self._partition(place).first_at(time_ms) for place, time_ms in times.items()}
        return {place: at and OffsetAndTimestamp(*at, -1) for place, at in found.items()}

    def assign(self, places: Sequence[TopicPartition]) -> None:
        self._assigned = list(places)
        self._positions = self.beginning_offsets(places)
        self._reading = {}

    def unsubscribe(self) -> None:
        self.assign(())

    def seek(self, place: TopicPartition, offset: int) -> None:
        self._positions[place] = offset
        self._reading.pop(place, None)

    def seek_to_end(self, place: TopicPartition) -> None:
        self.seek(place, self._partition(place).end)

    def position(self, place: TopicPartition, timeout_ms: int = 0) -> int:
        return self._positions[place]

    def poll(self, timeout_ms: int = 0) -> dict[TopicPartition, list[PolledBatch]]:
        """The next batches of one partition that has any. At the end of all: empty, after the time-out."""
        before = dict(self._positions)
        for place in list(self._assigned):
            if found := self._next(place):
                self._assigned.remove(place)  # the next poll begins with another
                self._assigned.append(place)
                return {place: found}
        if self._positions == before:
            time.sleep(timeout_ms / 1000)
        return {}

    def close(self, autocommit: bool = False, timeout_ms: int = 0) -> None:
        """Nothing to do: the index belongs to the process."""

    def _next(self, place: TopicPartition) -> list[PolledBatch]:
        """Up to `max_poll_batches` batches of `place`; the position passes hidden ones, too."""
        first, end = self._positions[place], self._partition(place).end
        if first >= end:
            return []
        if place not in self._reading:
            self._reading[place] = self._partition(place).batches(first, committed=True)
        found: list[PolledBatch] = []
        for last, batch in self._reading[place]:
            self._positions[place] = last + 1
            records = None if batch is None else read_batch(batch, place.partition, first, self._known)
            if records is not None and len(records):
                found.append(PolledBatch(place.topic, place.partition, last, records.timestamps[-1], records))
            if len(found) == self._max_poll_batches:
                return found
        self._positions[place] = end
        return found

    def _partition(self, place: TopicPartition) -> StoredPartition:
        return self._log.partition(place.topic, place.partition)
