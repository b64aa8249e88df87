"""Producers of a simulated cluster, with the methods and errors of the real ones that sessions and roles use.

As in `transactions.py`, a transactional request is sent at most once: a broken connection ends the producer. Batches of
records are sent again, with their sequence numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from kafka import TopicPartition
from kafka.errors import (
    InvalidProducerEpochError,
    InvalidProducerIdMappingError,
    InvalidTxnStateError,
    KafkaError,
    KafkaTimeoutError,
    OutOfOrderSequenceNumberError,
    ProducerFencedError,
)
from kafka.partitioner import DefaultPartitioner

from infra.kafka.producer import DeliveryFailed
from infra.kafka.transactions import TransactionInDoubt, TransactionTooSlow
from infra.simulation.brokers import Led
from infra.simulation.cluster import Place, SimulatedCluster
from infra.simulation.errors import (
    BrokerError,
    ConcurrentTransactions,
    ConnectionLost,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidTransactionState,
    NotCoordinator,
    OutOfOrderSequence,
    ProducerFenced,
)
from infra.simulation.network import SimulatedConnection
from infra.simulation.partition import ProducerKey
from schemas.codec import Headers

RETRIES = 6
"""How often a request that may be repeated is sent."""
RETRY_S = 0.3
NOT_EXECUTED = ConcurrentTransactions, NotCoordinator
"""Responses after which kafka-python repeats a request: it was not executed, or not to its end (InitProducerId)."""
NOT_EXECUTED_S = 0.05
PATIENCE_S = 60.0
"""How long requests that were not executed are repeated."""
_ERRORS: Mapping[type[BrokerError], type[KafkaError]] = {
    InvalidProducerEpoch: InvalidProducerEpochError,
    ProducerFenced: ProducerFencedError,
    InvalidProducerIdMapping: InvalidProducerIdMappingError,
    InvalidTransactionState: InvalidTxnStateError,
    OutOfOrderSequence: OutOfOrderSequenceNumberError,
}
_Result = TypeVar("_Result")


EncodeForRelease = Callable[[bytes, Headers], tuple[bytes, Headers]]
"""Value and headers as the release of a process writes them."""


def as_it_is(value: bytes, headers: Headers) -> tuple[bytes, Headers]:
    """The present release."""
    return value, headers


class SimulatedRecord(NamedTuple):
    """A record as the simulated cluster stores it; `timestamp` is in Unix milliseconds."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    timestamp: int


class Written(NamedTuple):
    """Where a record was written."""

    topic: str
    partition: int
    offset: int


class _Sent:
    """The future of a record."""

    def __init__(self, place: Place, message: SimulatedRecord) -> None:
        self.place, self.message = place, message
        self.offset: int | None = None
        self.exception: KafkaError | None = None

    @property
    def is_done(self) -> bool:
        return self.offset is not None or self.exception is not None

    def get(self, timeout: float | None = None) -> Written:
        """Where it was written. Raises the error of its request, KafkaTimeoutError if it was not sent yet."""
        if self.exception is not None:
            raise self.exception
        if self.offset is None:
            raise KafkaTimeoutError("the record was not sent")
        return Written(*self.place, self.offset)


def place_of(cluster: SimulatedCluster, topic: str, key: bytes | None, partition: int | None) -> Place:
    """The partition of a record, chosen as kafka-python does. Raises KafkaTimeoutError for an unknown topic."""
    partitions = cluster.partitions_of(topic)
    if not partitions:
        raise KafkaTimeoutError(f"topic {topic} is unknown")
    if partition is None:
        partition = partitions[0] if len(partitions) == 1 else DefaultPartitioner()(key or b"", partitions, partitions)
    return Place(topic, partition)


def resend(
    connection: SimulatedConnection,
    request: str,
    execute: Callable[[], _Result],
    *,
    writes: Led | None = None,
    reads: Iterable[Led] = (),
) -> _Result:
    """Send a request that may be repeated until it is answered. Raises KafkaTimeoutError, and the broker's error."""
    process, attempts = connection.process, 0
    deadline = process.monotonic() + PATIENCE_S
    while attempts < RETRIES and process.monotonic() < deadline:
        try:
            return connection.call(request, execute, writes=writes, reads=reads, idempotent=True)
        except NOT_EXECUTED:
            process.sleep(NOT_EXECUTED_S)
        except ConnectionLost:
            attempts += 1
            process.sleep(RETRY_S * attempts)
        except BrokerError as error:
            raise _ERRORS.get(type(error), KafkaError)(str(error)) from error
    raise KafkaTimeoutError(f"{request} was not answered")


class SimulatedProducer:
    """A transactional producer; the methods are those of `TransactionalProducer`."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        connection: SimulatedConnection,
        transactional_id: str,
        transaction_timeout_s: float,
        release: EncodeForRelease | None = None,
    ) -> None:
        self._cluster, self._connection, self._release = cluster, connection, release or as_it_is
        self._id, self._timeout_s = transactional_id, transaction_timeout_s
        self._producer = ProducerKey(-1, -1)
        self.failure: Exception | None = None
        self._breaks = 0
        self._deadline = 0.0
        self._sequences: dict[Place, int] = {}
        self._unsent: list[_Sent] = []
        self._added: set[Place] = set()
        self._places: dict[Place, None] = {}

    @property
    def producer_id(self) -> int:
        return self._producer.producer_id

    def init_transactions(self) -> None:
        """Fence the predecessors. Raises KafkaError."""
        self._producer = resend(
            self._connection,
            "InitProducerId",
            lambda: self._cluster.init_producer_id(self._id, self._timeout_s),
            writes=self._id,
        )
        self._breaks = self._connection.breaks

    def begin(self, partitions: Iterable[TopicPartition]) -> None:
        self._check()
        self._deadline = self._now() + 0.95 * self._timeout_s
        self._unsent, self._added = [], set()
        self._places = {Place(*each): None for each in partitions}

    def send(
        self,
        topic: str,
        value: bytes,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
        partition: int | None = None,
    ) -> _Sent:
        place = place_of(self._cluster, topic, key, partition)
        self._places[place] = None
        value, written = self._release(value, tuple(headers))
        sent = _Sent(place, SimulatedRecord(key, value, written, self._connection.process.unix_ms()))
        self._unsent.append(sent)
        return sent

    def flush(self, timeout: float | None = None) -> None:
        """Write the records sent so far. Raises KafkaError."""
        new = [place for place in self._places if place not in self._added]
        if new:
            places = tuple(new)
            self._once("AddPartitionsToTxn", lambda: self._cluster.add_partitions(self._id, self._producer, places))
            self._added.update(new)
        unsent, self._unsent = self._unsent, []
        batches: dict[Place, list[_Sent]] = {}
        for each in unsent:
            batches.setdefault(each.place, []).append(each)
        for place, batch in batches.items():
            self._produce(place, batch)

    def send_offsets_to_transaction(self, offsets: Mapping[TopicPartition, Any], group: str) -> None:
        self._once("AddOffsetsToTxn", lambda: self._cluster.add_offsets(self._id, self._producer, group))
        moved = {Place(*place): meta.offset for place, meta in offsets.items()}
        self._once(
            "TxnOffsetCommit", lambda: self._cluster.commit_offsets(self._id, group, self._producer, moved), group
        )

    def commit_transaction(self) -> None:
        """Commit. Raises KafkaError; its outcome is unknown then."""
        self.flush()
        self._once("EndTxn", lambda: self._cluster.end_transaction(self._id, self._producer, commit=True))
        self._deadline = 0.0

    def abort_transaction(self) -> None:
        """Abort. Raises KafkaError; its outcome is unknown then."""
        self._once("EndTxn", lambda: self._cluster.end_transaction(self._id, self._producer, commit=False))
        self._deadline = 0.0

    def reconnected(self) -> bool:
        """Whether the connection broke since the last call."""
        before, self._breaks = self._breaks, self._connection.breaks
        return before != self._breaks

    def close(self, timeout: float | None = None) -> None:
        """Close it; records that were not sent are dropped."""
        self._unsent = []

    def _produce(self, place: Place, batch: Sequence[_Sent]) -> None:
        sequence = self._sequences.get(place, 0)
        messages = tuple(each.message for each in batch)
        try:
            self._check()
            first = resend(
                self._connection,
                "Produce",
                lambda: self._cluster.produce(place, messages, self._producer, self._id, sequence),
                writes=place,
            )
        except KafkaError as error:
            self.failure = self.failure or error
            for each in batch:
                each.exception = error
            raise
        self._sequences[place] = sequence + len(batch)
        for index, each in enumerate(batch):
            each.offset = first + index

    def _once(self, request: str, execute: Callable[[], Any], group: str | None = None) -> None:
        """Send a request that must not be executed twice, to the coordinator of a group or its own.

        Raises KafkaError.
        """
        self._check()
        try:
            while True:
                try:
                    self._connection.call(request, execute, writes=group or self._id)
                    return
                except NOT_EXECUTED:
                    self._connection.process.sleep(NOT_EXECUTED_S)
                    self._check()
        except ConnectionLost as error:
            self.failure = TransactionInDoubt(f"the connection broke while {request} was in flight: {error}")
            raise self.failure from error
        except BrokerError as error:
            self.failure = _ERRORS.get(type(error), KafkaError)(str(error))
            raise self.failure from error

    def _check(self) -> None:
        """Raise the failure of this producer, and TransactionTooSlow once the transaction takes too long."""
        if self.failure is not None:
            raise self.failure
        if self._deadline and self._now() > self._deadline:
            self.failure = TransactionTooSlow(f"the transaction did not end within {self._timeout_s:g} s")
            raise self.failure

    def _now(self) -> float:
        return self._connection.process.monotonic()


class SimulatedSender(ABC):
    """A producer without transactions; the methods are those of `BoundedProducer`."""

    def __init__(
        self, cluster: SimulatedCluster, unix_ms: Callable[[], int], release: EncodeForRelease | None = None
    ) -> None:
        self._cluster, self._unix_ms, self._release = cluster, unix_ms, release or as_it_is

    def send(
        self,
        topic: str,
        value: bytes,
        *,
        key: bytes | None = None,
        headers: Iterable[tuple[str, bytes]] = (),
        partition: int | None = None,
    ) -> None:
        """Write a record. Raises DeliveryFailed; it may have been written, or be written later."""
        place = place_of(self._cluster, topic, key, partition)
        value, written = self._release(value, tuple(headers))
        self.write(place, SimulatedRecord(key, value, written, self._unix_ms()))

    @abstractmethod
    def write(self, place: Place, record: SimulatedRecord) -> None:
        """Write `record`; raises as `send`."""


class SimulatedPlainProducer(SimulatedSender):
    """The producer of a simulated process. It repeats requests when its connection breaks."""

    def __init__(
        self, cluster: SimulatedCluster, connection: SimulatedConnection, release: EncodeForRelease | None = None
    ) -> None:
        super().__init__(cluster, connection.process.unix_ms, release)
        self._connection = connection

    def write(self, place: Place, record: SimulatedRecord) -> None:
        """Write `record`; raises as `send`."""
        done: list[int] = []

        def execute() -> int:  # the broker recognises the repetition of a batch
            if not done:
                done.append(self._cluster.send(place, [record]))
            return done[0]

        try:
            resend(self._connection, "Produce", execute, writes=place)
        except KafkaError as error:
            raise DeliveryFailed(f"a record was not delivered: {error!r}") from error

    def flush(self, timeout_s: float) -> None:
        """Return at once: `send` waits."""

    def close(self, timeout_s: float = 10.0) -> None:
        """Close it."""
