"""The topics in the data folder of a stopped broker.

A transaction without a marker has the outcome that its coordinator decided. One that is not decided counts as aborted:
the coordinator aborts it when the broker is back, unless its producer returns and commits it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from kafka.errors import UnknownTopicOrPartitionError

from infra.kafka.record_batches import read_batch
from infra.kafka.stored.partition import StoredPartition
from infra.kafka.transaction_log import LOG, LoggedProducer, parse_decision, transactional_id

_PARTITION = re.compile(r"(.+)-(\d+)")
_BEGINNINGS = "log-start-offset-checkpoint"
"""Kafka's file with the first offset of partitions whose records were deleted: a version, a count, and a line each."""


@cache
def stored_log(folder: Path) -> StoredLog:
    """The log in `folder`, indexed once in this process."""
    return StoredLog(folder)


class StoredLog:
    """The log in the folder `folder` of a broker's data, with a folder for each partition."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begins = _read_beginnings(folder / _BEGINNINGS)
        self._partitions: dict[tuple[str, int], StoredPartition] = {}
        self._numbers: dict[str, list[int]] = {}
        for each in sorted(folder.iterdir()):
            found = _PARTITION.fullmatch(each.name)
            if found is not None and each.is_dir():
                self._numbers.setdefault(found[1], []).append(int(found[2]))

    def topics(self) -> list[str]:
        """The names of all topics, internal ones too, sorted."""
        return sorted(self._numbers)

    def numbers(self, topic: str) -> list[int]:
        """The partitions of `topic`; empty if there is no such topic."""
        return sorted(self._numbers.get(topic, ()))

    def partition(self, topic: str, number: int) -> StoredPartition:
        """A partition; its transactions have the outcomes in the coordinators' log. Raises KafkaError, OSError."""
        place = (topic, number)
        if number not in self._numbers.get(topic, ()):
            raise UnknownTopicOrPartitionError(f"{self._folder} has no partition {number} of a topic {topic}")
        if place not in self._partitions:
            stored = StoredPartition(self._folder / f"{topic}-{number}", self._begins.get(place, 0))
            self._partitions[place] = stored
            if stored.open and topic != LOG:
                logged = self._producers(frozenset(stored.open))
                stored.settle([each for each, producer in logged.items() if producer.has_committed(place)])
        return self._partitions[place]

    def unended_producers(self) -> dict[int, LoggedProducer]:
        """The coordinators' state, by producer id, of the producers with a transaction without a marker.

        In the partitions that were read so far.
        """
        return self._producers(frozenset(each for stored in self._partitions.values() for each in stored.unended))

    def _producers(self, producer_ids: frozenset[int]) -> dict[int, LoggedProducer]:
        found: dict[int, LoggedProducer] = {}
        for number in self.numbers(LOG):
            for _, batch in self.partition(LOG, number).batches(0, committed=False):
                records = read_batch(batch, number, 0) if batch is not None else None
                for key, value in zip(records.keys, records.values, strict=True) if records is not None else ():
                    if value is not None and (decision := parse_decision(value)).producer_id in producer_ids:
                        producer = found.setdefault(decision.producer_id, LoggedProducer())
                        producer.transactional_id = transactional_id(key or b"")
                        producer.add(decision)
        return found


def _read_beginnings(file: Path) -> Mapping[tuple[str, int], int]:
    try:
        lines = file.read_text("utf-8").splitlines()[2:]
    except FileNotFoundError:
        return {}
    rows = [line.split() for line in lines]
    return {(topic, int(number)): int(offset) for topic, number, offset in rows}
