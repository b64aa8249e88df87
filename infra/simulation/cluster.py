"""A Kafka cluster in memory: topics, transaction coordinator and group offsets. Each method is one request.

The transaction protocol is the one that kafka-python speaks: before KIP-890's version 2, with its check that a
partition was added to the transaction. `tests/infra/simulation` compares every response with that of the real broker. A
transaction's end is complete, markers included, when the request returns, unless `later` delays the markers: what the
cluster responds meanwhile follows Kafka's documentation and is not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from infra.simulation.errors import (
    ConcurrentTransactions,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidTransactionState,
    ProducerFenced,
)
from infra.simulation.partition import PartitionLog, ProducerKey

TransactionPhase = Literal["empty", "ongoing", "ending", "committed", "aborted"]
"""`ending`: how it ends is decided, but some of its markers are not written."""


class Place(NamedTuple):
    """A partition of a topic."""

    topic: str
    partition: int


@dataclass(slots=True)
class _Transaction:
    """The coordinator's state of a transactional.id."""

    producer_id: int
    epoch: int
    timeout_s: float
    state: TransactionPhase = "empty"
    places: set[Place] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)
    started_at: float = 0.0
    end: TransactionPhase = "empty"
    """How it ends, from then on."""
    unwritten: int = 0
    """Markers that are not written yet."""


class SimulatedCluster:
    """The cluster's present state. `now` is its clock in seconds, which the caller moves."""

    def __init__(self, topics: Mapping[str, int]) -> None:
        self.now = 0.0
        self._partitions = {topic: list(range(count)) for topic, count in topics.items()}
        self.committed: Callable[[Place], None] = lambda place: None
        """Called for each partition when the records that a read_committed consumer sees in it may have changed."""
        self.later: Callable[[Place | str, Callable[[], None]], None] = lambda led, write: write()
        """Called to write the end of a transaction to a partition or a group, now or later."""
        self._logs = {
            Place(topic, number): PartitionLog() for topic, count in topics.items() for number in range(count)
        }
        self._transactions: dict[str, _Transaction] = {}
        self._offsets: dict[str, dict[Place, tuple[int, int]]] = {}
        """By group: when each offset was written, and the offset. A later commit of an older one changes nothing."""
        self._pending: dict[tuple[str, ProducerKey], dict[Place, tuple[int, int]]] = {}
        self._offset_writes = 0
        self._next_producer_id = 0

    def log(self, place: Place) -> PartitionLog:
        """The log of a partition. Raises KeyError for an unknown one."""
        return self._logs[place]

    def delete_before(self, place: Place, offset: int) -> None:
        """Delete the records of a partition before `offset`. Raises OffsetOutOfRange beyond the end."""
        self._logs[place].delete_before(offset)

    def places(self) -> list[Place]:
        """All partitions, sorted."""
        return sorted(self._logs)

    def topics(self) -> list[str]:
        """The names of all topics, sorted."""
        return sorted(self._partitions)

    def groups(self) -> list[str]:
        """The groups that have committed offsets, sorted."""
        return sorted(self._offsets)

    def partitions_of(self, topic: str) -> list[int]:
        """The partitions of a topic; empty for an unknown one."""
        return self._partitions.get(topic, [])

    def init_producer_id(self, transactional_id: str, timeout_s: float = 60.0) -> ProducerKey:
        """Fence the earlier producers of an id, abort their open transaction, and return the new producer.

        Raises ConcurrentTransactions until that transaction has ended.
        """
        found = self._transactions.get(transactional_id)
        if found is None:
            found = self._transactions[transactional_id] = _Transaction(self._next_producer_id, -1, timeout_s)
            self._next_producer_id += 1
        elif found.state == "ongoing":
            self._fence_and_abort(found)
        self._check_ended(transactional_id, found)
        found.epoch, found.state, found.timeout_s = found.epoch + 1, "empty", timeout_s
        return ProducerKey(found.producer_id, found.epoch)

    def add_partitions(self, transactional_id: str, producer: ProducerKey, places: Iterable[Place]) -> None:
        """Begin a transaction, or add partitions to it.

        Raises InvalidProducerIdMapping, ProducerFenced, ConcurrentTransactions.
        """
        self._begin(transactional_id, producer).places.update(places)

    def add_offsets(self, transactional_id: str, producer: ProducerKey, group: str) -> None:
        """Add the offsets of a group to the transaction. Raises as `add_partitions`."""
        self._begin(transactional_id, producer).groups.add(group)

    def produce(
        self, place: Place, values: Sequence[Any], producer: ProducerKey, transactional_id: str, sequence: int
    ) -> int:
        """Append transactional records; return the offset of the first.

        Raises InvalidTransactionState if the partition was not added to the transaction, and as PartitionLog.append.
        """
        log = self._logs[place]
        if not log.is_open(producer):
            log.attempt(producer, sequence)
            found = self._verified(transactional_id, producer)
            self._check_ended(transactional_id, found)
            if found.state != "ongoing" or place not in found.places:
                raise InvalidTransactionState(f"{place} is not in a transaction of {transactional_id}")
        return log.append(values, producer, sequence)

    def send(self, place: Place, values: Sequence[Any]) -> int:
        """Append records of a plain producer; return the offset of the first."""
        offset = self._logs[place].append(values)
        self.committed(place)
        return offset

    def commit_offsets(
        self, transactional_id: str, group: str, producer: ProducerKey, offsets: Mapping[Place, int]
    ) -> None:
        """Commit a group's offsets within a transaction.

        Raises InvalidTransactionState if the group was not added to the transaction, and as `add_partitions`.
        """
        if (group, producer) not in self._pending:
            found = self._verified(transactional_id, producer)
            self._check_ended(transactional_id, found)
            if found.state != "ongoing" or group not in found.groups:
                raise InvalidTransactionState(f"group {group} is not in a transaction of {transactional_id}")
        self._offset_writes += 1
        written = {place: (self._offset_writes, offset) for place, offset in offsets.items()}
        self._pending.setdefault((group, producer), {}).update(written)

    def end_transaction(self, transactional_id: str, producer: ProducerKey, *, commit: bool) -> None:
        """Commit or abort the transaction; a repetition of the last end does nothing.

        Raises InvalidTransactionState if there is no transaction, or it has ended the other way, and as
        `add_partitions`.
        """
        found = self._known(transactional_id, producer)
        end: TransactionPhase = "committed" if commit else "aborted"
        if found.state == "ongoing":
            self._end(found, producer, commit=commit)
            return
        if found.end == end:
            self._check_ended(transactional_id, found)
        if found.state != end:
            raise InvalidTransactionState(f"the transaction of {transactional_id} is {found.state}")

    def expire(self) -> None:
        """Abort the transactions that are older than their time-out, and fence their producers."""
        for found in self._transactions.values():
            if found.state == "ongoing" and self.now - found.started_at >= found.timeout_s:
                self._fence_and_abort(found)

    def open_transactions(self) -> list[str]:
        """The transactional ids with an open transaction, sorted."""
        return sorted(name for name, found in self._transactions.items() if found.state in ("ongoing", "ending"))

    def committed_offsets(self, group: str) -> Mapping[Place, int]:
        """The offsets that a group has committed."""
        return {place: offset for place, (_, offset) in self._offsets.get(group, {}).items()}

    def forget_offsets(self) -> None:
        """Delete the offsets of all groups, as Kafka does when nobody has committed for long."""
        self._offsets.clear()

    def _known(self, transactional_id: str, producer: ProducerKey) -> _Transaction:
        found = self._transactions.get(transactional_id)
        if found is None or found.producer_id != producer.producer_id:
            raise InvalidProducerIdMapping(f"producer {producer.producer_id} is not that of {transactional_id}")
        if found.epoch != producer.epoch:
            raise ProducerFenced(f"epoch {producer.epoch} of {transactional_id}; the newest is {found.epoch}")
        return found

    def _verified(self, transactional_id: str, producer: ProducerKey) -> _Transaction:
        """The transaction for a partition's leader, which names a fenced producer in its own way."""
        try:
            return self._known(transactional_id, producer)
        except ProducerFenced as error:
            raise InvalidProducerEpoch(str(error)) from error

    @staticmethod
    def _check_ended(transactional_id: str, found: _Transaction) -> None:
        if found.state == "ending":
            raise ConcurrentTransactions(f"{found.unwritten} markers of {transactional_id} are not written")

    def _begin(self, transactional_id: str, producer: ProducerKey) -> _Transaction:
        found = self._known(transactional_id, producer)
        self._check_ended(transactional_id, found)
        if found.state != "ongoing":
            found.state, found.places, found.groups, found.started_at = "ongoing", set(), set(), self.now
        return found

    def _fence_and_abort(self, found: _Transaction) -> None:
        before = ProducerKey(found.producer_id, found.epoch)
        found.epoch += 1
        self._end(found, before, commit=False)

    def _end(self, found: _Transaction, producer: ProducerKey, *, commit: bool) -> None:
        """Write the markers with the coordinator's epoch, and decide the pending offsets."""
        marker = ProducerKey(found.producer_id, found.epoch)
        found.state, found.end = "ending", "committed" if commit else "aborted"
        found.unwritten = len(found.places) + len(found.groups)
        if not found.unwritten:
            found.state = found.end
        for place in sorted(found.places):
            self.later(place, partial(self._mark, found, place, marker))
        for group in sorted(found.groups):
            self.later(group, partial(self._decide, found, group, producer))

    def _mark(self, found: _Transaction, place: Place, marker: ProducerKey) -> None:
        self._logs[place].end_transaction(marker, commit=found.end == "committed")
        self.committed(place)
        self._written(found)

    def _decide(self, found: _Transaction, group: str, producer: ProducerKey) -> None:
        pending = self._pending.pop((group, producer), {})
        if found.end == "committed":
            known = self._offsets.setdefault(group, {})
            known.update({place: max(each, known.get(place, each)) for place, each in pending.items()})
        self._written(found)

    @staticmethod
    def _written(found: _Transaction) -> None:
        found.unwritten -= 1
        if not found.unwritten:
            found.state = found.end
