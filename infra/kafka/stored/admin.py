"""An admin client of the log of a stopped broker: the methods of a KafkaAdminClient that read-only commands use."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kafka import TopicPartition
from kafka.admin import OffsetSpec, TransactionState
from kafka.structs import OffsetAndMetadata

from infra.closing import ClosedAtExit
from infra.kafka.record_batches import RecordBatch, read_batch
from infra.kafka.stored.log import stored_log
from infra.kafka.stored.metadata import (
    METADATA,
    OFFSETS,
    committed_offset,
    key_of_offset,
    snapshot_values,
    topic_settings,
)
from infra.kafka.transaction_log import LoggedProducer

_UNKNOWN_TOPIC = 3


class ListedOffset(NamedTuple):
    """An offset as kafka-python's `list_partition_offsets` returns it."""

    offset: int


def described_topics(partitions: Mapping[str, Collection[int]]) -> list[dict[str, Any]]:
    """Topics with these partitions, as kafka-python's `describe_topics` returns them; without any it is unknown."""
    return [
        {
            "name": topic,
            "error_code": 0 if numbers else _UNKNOWN_TOPIC,
            "partitions": [{"partition_index": number, "replica_nodes": [1]} for number in numbers],
        }
        for topic, numbers in partitions.items()
    ]


class _Producer(NamedTuple):
    """A producer with an open transaction, as kafka-python's ProducerState; nothing needs its epochs."""

    producer_id: int
    current_transaction_start_offset: int
    last_timestamp: int
    producer_epoch: int = -1
    coordinator_epoch: int = -1


class _Producers(NamedTuple):
    active_producers: list[_Producer]


class _Transaction(NamedTuple):
    producer_id: int
    state: TransactionState


class StoredAdmin(ClosedAtExit):
    """Topics and groups of the log in the folder `log`. Methods that change something are missing."""

    def __init__(self, log: Path) -> None:
        self._folder, self._log = log, stored_log(log)

    def close(self) -> None:
        """Nothing to do: the index belongs to the process."""

    def list_topics(self) -> list[str]:
        return [topic for topic in self._log.topics() if topic != METADATA]

    def describe_topics(self, topics: Sequence[str]) -> list[dict[str, Any]]:
        return described_topics({topic: self._log.numbers(topic) for topic in topics})

    def describe_configs(self, resources: Iterable[Any]) -> dict[str, dict[str, Any]]:
        """The settings of topics that differ from the broker's."""
        batches = (batch.values for batch in self._batches(METADATA, committed=False))
        values = (value for each in batches for value in each if value is not None)
        found = topic_settings([*snapshot_values(self._folder / f"{METADATA}-0"), *values])
        return {
            "topic": {
                each.name: {name: {"value": value} for name, value in found.get(each.name, {}).items()}
                for each in resources
            }
        }

    def list_partition_offsets(
        self, wanted: Mapping[TopicPartition, Any], isolation_level: str = "read_uncommitted"
    ) -> dict[TopicPartition, ListedOffset]:
        """The beginnings or ends; no transaction is open, so they are the same at both isolation levels."""
        stored = {place: self._log.partition(place.topic, place.partition) for place in wanted}
        return {
            place: ListedOffset(stored[place].beginning if spec == OffsetSpec.EARLIEST else stored[place].end)
            for place, spec in wanted.items()
        }

    def list_groups(self) -> list[dict[str, str]]:
        return [{"group_id": group} for group in sorted({group for group, _ in self._committed()})]

    def list_group_offsets(self, groups: str | Sequence[str]) -> dict[str, dict[TopicPartition, OffsetAndMetadata]]:
        wanted = [groups] if isinstance(groups, str) else groups
        found: dict[str, dict[TopicPartition, OffsetAndMetadata]] = {group: {} for group in wanted}
        for (group, place), offset in self._committed().items():
            if group in found:
                found[group][place] = OffsetAndMetadata(offset, "", -1)
        return found

    def describe_producers(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, _Producers]:
        """The producers of the transactions without a marker."""
        return {place: _Producers(self._unended(place)) for place in places}

    def list_transactions(self) -> dict[int, list[LoggedProducer]]:
        """The transactions in the coordinators' log of those producers."""
        return {1: list(self._log.unended_producers().values())}

    def describe_transactions(self, names: Collection[str]) -> dict[str, _Transaction]:
        logged = self._log.unended_producers()
        return {
            each.transactional_id: _Transaction(producer_id, each.state)
            for producer_id, each in logged.items()
            if each.transactional_id in names
        }

    def _unended(self, place: TopicPartition) -> list[_Producer]:
        stored = self._log.partition(place.topic, place.partition)
        return [_Producer(each, first, stored.last_write(each)) for each, first in stored.unended.items()]

    def _committed(self) -> dict[tuple[str, TopicPartition], int]:
        """The committed offsets by group and partition."""
        found: dict[tuple[str, TopicPartition], int] = {}
        for batch in self._batches(OFFSETS, committed=True):
            for key, value in zip(batch.keys, batch.values, strict=True):
                if key is None:
                    continue
                if value is None:
                    if (removed := key_of_offset(key)) is not None:
                        found.pop((removed[0], TopicPartition(*removed[1:])), None)
                elif (each := committed_offset(key, value)) is not None:
                    found[each[0], TopicPartition(each[1], each[2])] = each[3]
        return found

    def _batches(self, topic: str, *, committed: bool) -> Iterator[RecordBatch]:
        for number in self._log.numbers(topic):
            stored = self._log.partition(topic, number)
            for _, batch in stored.batches(stored.beginning, committed=committed):
                if batch is not None and not batch.is_control_batch:
                    yield read_batch(batch, number, 0)
