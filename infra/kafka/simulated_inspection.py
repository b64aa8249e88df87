"""Clients of a simulated cluster for commands: admin client, reader of batches, and producer.

A command waits with `sleep`: `request_s` seconds for each request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kafka import TopicPartition
from kafka.admin import OffsetSpec
from kafka.structs import OffsetAndMetadata

from infra.closing import ClosedAtExit
from infra.kafka.consumers import warn_of_gap
from infra.kafka.simulated_consumer import record_batch
from infra.kafka.simulated_producer import SimulatedRecord, SimulatedSender
from infra.kafka.stored.admin import ListedOffset, described_topics
from infra.kafka.stored.consumer import PolledBatch
from infra.simulation.cluster import Place, SimulatedCluster


class InspectionClients:
    """The clients of a command on `cluster`, see `ClientProperties.clients`; `unix_ms` is its time of day."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        sleep: Callable[[float], None] = lambda seconds: None,
        unix_ms: Callable[[], int] = lambda: 0,
        request_s: float = 0.0,
    ) -> None:
        self.cluster, self.unix_ms = cluster, unix_ms
        self._sleep, self._request_s = sleep, request_s

    def pause(self, seconds: float, /) -> None:
        """Wait."""
        self._sleep(seconds)

    def request(self) -> None:
        """Wait for a response."""
        self._sleep(self._request_s)

    def admin(self) -> InspectionAdmin:
        """A KafkaAdminClient."""
        return InspectionAdmin(self)

    def consumer(self) -> InspectionConsumer:
        """A consumer of committed records by batches, as `infra.kafka.consumers.new_consumer` returns it."""
        return InspectionConsumer(self)

    def producer(self) -> InspectionProducer:
        """A BoundedProducer."""
        return InspectionProducer(self)


class InspectionAdmin(ClosedAtExit):
    """Topics and groups, with the methods of a KafkaAdminClient."""

    def __init__(self, clients: InspectionClients) -> None:
        self._cluster, self._request = clients.cluster, clients.request

    def close(self) -> None:
        """Nothing to do."""

    def list_topics(self) -> list[str]:
        self._request()
        return self._cluster.topics()

    def wait_for_topics(self, topics: Sequence[str], timeout_ms: int = 0) -> None:
        self._request()

    def describe_topics(self, topics: Sequence[str]) -> list[dict[str, Any]]:
        self._request()
        return described_topics({topic: self._cluster.partitions_of(topic) for topic in topics})

    def list_partition_offsets(
        self, wanted: Mapping[TopicPartition, Any], isolation_level: str = "read_uncommitted"
    ) -> dict[TopicPartition, ListedOffset]:
        self._request()
        found = {}
        for place, spec in wanted.items():
            log = self._cluster.log(Place(*place))
            end = log.stable_end if isolation_level == "read_committed" else log.end
            found[place] = ListedOffset(log.begin if spec == OffsetSpec.EARLIEST else end)
        return found

    def list_groups(self) -> list[dict[str, str]]:
        self._request()
        return [{"group_id": group} for group in self._cluster.groups()]

    def list_group_offsets(self, group: str) -> dict[str, dict[TopicPartition, OffsetAndMetadata]]:
        self._request()
        committed = self._cluster.committed_offsets(group)
        return {
            group: {TopicPartition(*place): OffsetAndMetadata(offset, "", -1) for place, offset in committed.items()}
        }

    def delete_records(self, before: Mapping[TopicPartition, int]) -> None:
        """One request for each partition, as each has its leader."""
        for place, offset in before.items():
            self._request()
            self._cluster.delete_before(Place(*place), offset)


class InspectionConsumer:
    """Reads committed records by batches."""

    def __init__(self, clients: InspectionClients) -> None:
        self._cluster, self._request = clients.cluster, clients.request
        self._positions: dict[TopicPartition, int] = {}

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        return set(self._cluster.partitions_of(topic)) or None

    def beginning_offsets(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        self._request()
        return {place: self._cluster.log(Place(*place)).begin for place in places}

    def end_offsets(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        self._request()
        return {place: self._cluster.log(Place(*place)).stable_end for place in places}

    def assign(self, places: Sequence[TopicPartition]) -> None:
        self._positions = {place: self._cluster.log(Place(*place)).begin for place in places}

    def unsubscribe(self) -> None:
        self._positions = {}

    def seek(self, place: TopicPartition, offset: int) -> None:
        self._positions[place] = offset

    def position(self, place: TopicPartition, timeout_ms: int = 0) -> int:
        return self._positions[place]

    def poll(self, timeout_ms: int = 0) -> dict[TopicPartition, list[PolledBatch]]:
        """All committed records from the positions on; earlier ones were deleted, if the log begins later."""
        self._request()
        return {place: found for place in self._positions if (found := self._batches(place))}

    def close(self, autocommit: bool = False, timeout_ms: int = 0) -> None:
        """Nothing to do."""

    def _batches(self, place: TopicPartition) -> list[PolledBatch]:
        log = self._cluster.log(Place(*place))
        first, found = max(self._positions[place], log.begin), []
        warn_of_gap(place, self._positions[place], first)
        for batch in log.batches(first, committed=True):
            if batch.records:
                held = record_batch(place.partition, batch)
                newest = held.timestamps[-1]
                found.append(
                    PolledBatch(place.topic, place.partition, batch.end - 1, newest, held.between(first, None))
                )
        self._positions[place] = log.stable_end
        return found


class InspectionProducer(SimulatedSender, ClosedAtExit):
    """Writes records at once, with the methods of a BoundedProducer."""

    def __init__(self, clients: InspectionClients) -> None:
        super().__init__(clients.cluster, clients.unix_ms)
        self._request = clients.request

    def write(self, place: Place, record: SimulatedRecord) -> None:
        """Write `record` at once."""
        self._request()
        self._cluster.send(place, [record])

    def flush(self, timeout_s: float) -> None:
        """Return at once: `send` waits."""

    def close(self, timeout_s: float = 10.0) -> None:
        """Nothing to do."""
