"""Consumers of a simulated cluster, with the methods of kafka-python's that sessions use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from kafka import TopicPartition
from kafka.errors import OffsetOutOfRangeError

from infra.kafka.record_batches import Marker, RecordBatch
from infra.kafka.simulated_producer import resend
from infra.simulation.cluster import Place, SimulatedCluster
from infra.simulation.network import SimulatedConnection
from infra.simulation.partition import PartitionLog
from infra.simulation.scheduler import EventScheduler, Signal

MAX_FAILING_S = 3.0
"""How long a partition cannot be fetched, at most."""
SHORTEST_S = 0.001
"""The shortest wait, with which time passes whatever is rounded."""


class ReceivedMessage(NamedTuple):
    """A record with the attributes of kafka-python's ConsumerRecord."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]


class CommitSignals:
    """Wakes the consumers of partitions whose committed records have changed."""

    def __init__(self, cluster: SimulatedCluster, scheduler: EventScheduler) -> None:
        self._signals: dict[Place, Signal] = {}
        self._scheduler = scheduler
        cluster.committed = self._committed

    def of(self, place: Place) -> Signal:
        """The signal of a partition."""
        return self._signals.setdefault(place, Signal())

    def _committed(self, place: Place) -> None:
        if place in self._signals:
            self._scheduler.notify(self._signals[place])


class SimulatedConsumer:
    """A consumer without a group. Some polls return only a part of what is committed, as real ones do."""

    committed = True

    def __init__(self, cluster: SimulatedCluster, connection: SimulatedConnection, signals: CommitSignals) -> None:
        self._cluster, self._connection, self._signals = cluster, connection, signals
        self._draws = connection.draws("partial polls")
        self._positions: dict[Place, int] = {}
        self._highwater: dict[Place, int] = {}
        self._failing: dict[Place, float] = {}
        """Partitions that cannot be fetched, and until when."""

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        return set(self._cluster.partitions_of(topic)) or None

    def assign(self, places: Iterable[TopicPartition]) -> None:
        self._positions = {Place(*place): self._positions.get(Place(*place), 0) for place in places}

    def seek(self, place: TopicPartition, offset: int) -> None:
        self._positions[Place(*place)] = offset

    def seek_to_beginning(self, place: TopicPartition) -> None:
        self.seek(place, self.beginning_offsets([place])[place])

    def seek_to_end(self, place: TopicPartition) -> None:
        of = attrgetter("stable_end" if self.committed else "end")
        self.seek(place, self._ask([place], of)[place])

    def position(self, place: TopicPartition, timeout_ms: int | None = None) -> int:
        return self._positions[Place(*place)]

    def highwater(self, place: TopicPartition) -> int | None:
        return self._highwater.get(Place(*place))

    def beginning_offsets(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return self._ask(places, attrgetter("begin"))

    def end_offsets(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return self._ask(places, attrgetter("end"))

    def poll(self, timeout_ms: int = 0) -> dict[TopicPartition, list[Any]]:
        """The next records; empty after `timeout_ms`. Raises OffsetOutOfRangeError."""
        scheduler, process = self._connection.network.scheduler, self._connection.process
        deadline = scheduler.now + timeout_ms / 1000
        while True:
            self._failing = {place: until for place, until in self._failing.items() if until > scheduler.now}
            if not self._connection.network.is_cut(process.name) and (found := self._fetch()):
                process.sleep(self._connection.latency("Fetch"))
                return found
            if (left := deadline - scheduler.now) <= 0:
                return {}
            ends = [max(until - scheduler.now, SHORTEST_S) for until in self._failing.values()]
            scheduler.wait([self._signals.of(place) for place in self._positions], min([left, *ends]))

    def close(self, autocommit: bool = True, timeout_ms: int | None = None) -> None:
        """Close it."""

    def _fetch(self) -> dict[TopicPartition, list[Any]]:
        found: dict[TopicPartition, list[Any]] = {}
        self._fail_some()
        places = [
            place
            for place in self._positions
            if self._answers(place) and self._positions[place] < self._end(place) and place not in self._failing
        ]
        partial = len(places) > 0 and self._draws.random() < 0.25
        if partial:
            places = self._draws.sample(places, self._draws.randint(1, len(places)))
        for place in places:
            most = self._draws.choice((1, 2, 5)) if partial else 2000
            if records := list(self._records(place, most)):
                found[TopicPartition(*place)] = records
        return found

    def _fail_some(self) -> None:
        """With a fault of the request, some partitions give nothing for a while, as those of a broker that fails."""
        network, name = self._connection.network, self._connection.process.name
        if (fault := network.fault_of(name, "Fetch")) is not None:
            draws = self._connection.draws("failing partitions")
            until = network.scheduler.now + draws.uniform(0.2, MAX_FAILING_S)
            failing = [place for place in self._positions if draws.random() < 0.5]
            self._failing |= dict.fromkeys(failing, until)
            if failing and network.trace is not None:
                network.trace(name, f"Fetch of {len(failing)} partitions", fault)

    def _answers(self, place: Place) -> bool:
        return self._connection.network.brokers.answer(self._connection.process.name, [place])

    def _end(self, place: Place) -> int:
        log = self._log(place)
        if not log.begin <= self._positions[place] <= log.end:
            raise OffsetOutOfRangeError({TopicPartition(*place): self._positions[place]})
        self._highwater[place] = log.end
        return log.stable_end if self.committed else log.end

    def _records(self, place: Place, most: int) -> Iterator[Any]:
        """The next records, at most about `most`; moves the position past them and the markers after them."""
        position, count = self._positions[place], 0
        for batch in self._log(place).batches(position, committed=self.committed):
            if count >= most:
                self._positions[place] = batch.base
                return
            for offset, message in batch.records:
                if offset >= position:
                    count += 1
                    yield ReceivedMessage(
                        *place, offset, message.timestamp, message.key, message.value, message.headers
                    )
        self._positions[place] = self._end(place)

    def _ask(self, places: Iterable[TopicPartition], of: Callable[[Any], int]) -> dict[TopicPartition, int]:
        asked = [Place(*place) for place in places]
        return resend(
            self._connection,
            "ListOffsets",
            lambda: {TopicPartition(*place): of(self._log(place)) for place in asked},
            reads=asked,
        )

    def _log(self, place: Place) -> PartitionLog:
        return self._connection.network.brokers.log(self._connection.process.name, place)


def record_batch(partition: int, batch: Any) -> RecordBatch:
    """The messages of a simulated log's `batch`, which has some, as columns."""
    offsets, messages = zip(*batch.records, strict=True)
    keys, values, headers, times = zip(*messages, strict=True)
    columns = (offsets, times, keys, values, headers)
    by_role = batch.producer is not None
    return RecordBatch(partition, *columns, producer_id=_producer_id(batch), transactional=by_role)


def _producer_id(batch: Any) -> int:
    return -1 if batch.producer is None else int(batch.producer.producer_id)


class SimulatedObserver(SimulatedConsumer):
    """A consumer of batches and markers that reads open transactions too."""

    committed = False

    def _records(self, place: Place, most: int) -> Iterator[Any]:
        for batch in self._log(place).batches(self._positions[place], committed=False):
            if batch.commits is not None:
                yield _Held(Marker(_producer_id(batch), batch.commits))
            elif batch.records:
                yield _Held(record_batch(place.partition, batch))
        self._positions[place] = self._end(place)


class _Held(NamedTuple):
    """A batch or marker as `read_to_end` receives it."""

    value: RecordBatch | Marker
