"""The clients of a simulated process, with which a real Session runs on a cluster in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kafka import TopicPartition
from kafka.errors import KafkaTimeoutError

from infra.kafka.clients import Lock
from infra.kafka.simulated_consumer import CommitSignals, SimulatedConsumer, SimulatedObserver
from infra.kafka.simulated_producer import EncodeForRelease, SimulatedPlainProducer, SimulatedProducer, as_it_is, resend
from infra.simulation.cluster import Place, SimulatedCluster
from infra.simulation.network import SimulatedConnection
from infra.simulation.partition import PartitionLog


@dataclass(frozen=True)
class SimulatedClients:
    """The `SessionClients` of the process at the end of `connection`."""

    cluster: SimulatedCluster
    connection: SimulatedConnection
    signals: CommitSignals
    release: EncodeForRelease = as_it_is
    """How the release of this process writes records."""

    def problem(self) -> str | None:
        process = self.connection.process
        return "no broker responds" if self.connection.network.is_cut(process.name) else None

    def producer(self, transactional_id: str, transaction_timeout_s: float) -> SimulatedProducer:
        return SimulatedProducer(self.cluster, self.connection, transactional_id, transaction_timeout_s, self.release)

    def plain_producer(self) -> SimulatedPlainProducer:
        """A producer without transactions."""
        return SimulatedPlainProducer(self.cluster, self.connection, self.release)

    def consumer(self) -> SimulatedConsumer:
        return SimulatedConsumer(self.cluster, self.connection, self.signals)

    def observer(self) -> SimulatedObserver:
        return SimulatedObserver(self.cluster, self.connection, self.signals)

    def committed(self, group: str) -> Mapping[TopicPartition, int]:
        offsets = resend(self.connection, "OffsetFetch", lambda: self.cluster.committed_offsets(group), reads=[group])
        return {TopicPartition(*place): offset for place, offset in offsets.items()}

    def check_own_transactions(self, group: str, producer_id: int, places: Collection[TopicPartition]) -> None:
        asked = [Place(*place) for place in places]
        found = resend(
            self.connection,
            "DescribeProducers",
            lambda: [place for place in asked if producer_id in self._log(place).open_producers()],
            reads=asked,
        )
        if found:
            raise KafkaTimeoutError(f"an earlier transaction of {group} is still open in {found}")

    def end_own_transactions(self, group: str, producer_id: int, places: Collection[TopicPartition]) -> None:
        self.check_own_transactions(group, producer_id, places)  # a simulated cluster loses no markers

    def blocking(self, places: Sequence[TopicPartition]) -> Sequence[str]:
        return ()

    def backlog(self, group: str, topic: str) -> int | None:
        """The records of `topic` that `group` has not committed, see `lag.Backlog`."""
        if self.problem() is not None:
            return None
        places = self._places([topic])
        try:
            committed = resend(
                self.connection, "OffsetFetch", lambda: self.cluster.committed_offsets(group), reads=[group]
            )
            ends = resend(
                self.connection,
                "ListOffsets",
                lambda: {each: self._log(each).stable_end for each in places},
                reads=places,
            )
        except KafkaTimeoutError:
            return None
        return sum(end - committed.get(place, 0) for place, end in ends.items())

    def lock(self) -> Lock:
        return self.connection.process.lock()

    def monotonic(self) -> float:
        return self.connection.process.monotonic()

    def unix_ms(self) -> int:
        return self.connection.process.unix_ms()

    def sleep(self, seconds: float) -> None:
        self.connection.process.sleep(seconds)

    def _log(self, place: Place) -> PartitionLog:
        return self.connection.network.brokers.log(self.connection.process.name, place)

    def _places(self, topics: Sequence[str]) -> list[Place]:
        return [Place(topic, partition) for topic in topics for partition in self.cluster.partitions_of(topic)]
