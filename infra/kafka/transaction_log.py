"""The outcomes of transactions, read from the coordinators' log `__transaction_state`.

A coordinator tells only the state of a producer's last transaction, forgets it as soon as the producer starts again,
and knows nothing while it loads. Its log has each decision with the partitions of the transaction (Kafka's
TransactionLogValue, versions 0 and 1).
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass, field
from io import BytesIO
from itertools import chain
from typing import Any, NamedTuple

from kafka import TopicPartition
from kafka.admin import TransactionState
from kafka.protocol.schemas.fields import BaseField

from infra.kafka.note import read_to_end, uncommitted_consumer
from infra.kafka.properties import ClientProperties
from infra.kafka.record_batches import RecordBatch, known_partitions

LOG = "__transaction_state"
_ONGOING, _PREPARE_COMMIT, _PREPARE_ABORT, _PREPARE_EPOCH_FENCE = 1, 2, 3, 7
_UNDER_WAY = (_ONGOING, _PREPARE_COMMIT, _PREPARE_ABORT, _PREPARE_EPOCH_FENCE)
_FLEXIBLE_VERSION = 1
_TOPICS = BaseField.parse_json(
    {
        "name": "TransactionPartitions",
        "type": "[]PartitionsSchema",
        "versions": "0+",
        "fields": [
            {"name": "Topic", "type": "string", "versions": "0+"},
            {"name": "PartitionIds", "type": "[]int32", "versions": "0+"},
        ],
    }
)


class DamagedTransactionLog(ValueError):
    """A record of the log cannot be parsed."""


class TransactionRecord(NamedTuple):
    """A state of a producer's transaction: ended as `committed` over `partitions`; None: begun, or no transaction."""

    producer_id: int
    under_way: bool
    committed: bool | None
    partitions: frozenset[tuple[str, int]]


@dataclass
class LoggedProducer:
    """What the log has of a producer: whether its last transaction is `under_way`, and whether the last one in each
    partition was committed.
    """

    under_way: bool = False
    ongoing: bool = False
    """Under way, and not decided yet."""
    committed: dict[tuple[str, int], bool] = field(default_factory=dict)
    transactional_id: str = ""
    """Empty if it was not read, see `transactional_id`."""
    decision: bool | None = None
    """The outcome of the transaction under way; None: not decided."""

    @property
    def state(self) -> TransactionState:
        """The coordinator's state of its last transaction."""
        if not self.under_way:
            return TransactionState.EMPTY
        outcomes = {True: TransactionState.PREPARE_COMMIT, False: TransactionState.PREPARE_ABORT}
        return TransactionState.ONGOING if self.ongoing else outcomes[bool(self.decision)]

    def add(self, decision: TransactionRecord) -> None:
        """Add the next record of this producer."""
        self.under_way = decision.under_way
        self.ongoing = decision.under_way and decision.committed is None
        self.decision = decision.committed
        if decision.committed is not None:
            self.committed |= dict.fromkeys(decision.partitions, decision.committed)

    def has_committed(self, place: tuple[str, int]) -> bool:
        """Whether its transaction without a marker in the partition `place` is decided, and committed."""
        return not self.ongoing and self.committed.get(place, False)


def logged_producers(client: ClientProperties, producer_ids: Collection[int]) -> dict[int, LoggedProducer]:
    """The producers of `producer_ids` that are in the log, by id.

    Reads the whole log. Raises KafkaError, also if the log may not be read, and DamagedTransactionLog.
    """
    found: dict[int, LoggedProducer] = {}
    observer = uncommitted_consumer(client)
    try:
        places = [TopicPartition(LOG, number) for number in sorted(known_partitions(observer, LOG))]
        for batch in chain.from_iterable(read_to_end(observer, place, None) for place in places):
            for value in batch.values if isinstance(batch, RecordBatch) else ():
                if value is not None and (decision := parse_decision(value)).producer_id in producer_ids:
                    found.setdefault(decision.producer_id, LoggedProducer()).add(decision)
    finally:
        observer.close(autocommit=False)
    return found


def transactional_id(key: bytes) -> str:
    """The transactional.id in a key of the log (Kafka's TransactionLogKey). Raises DamagedTransactionLog."""
    try:
        _version, length = struct.unpack_from(">hh", key)
        return key[4 : 4 + length].decode()
    except (struct.error, UnicodeDecodeError) as error:
        raise DamagedTransactionLog(f"a key of {LOG} cannot be parsed: {error}") from error


def parse_decision(value: bytes) -> TransactionRecord:
    """The state in a value of the log. Raises DamagedTransactionLog."""
    try:
        version, producer_id, _epoch, _timeout_ms, status = struct.unpack_from(">hqhib", value)
        if version not in (0, _FLEXIBLE_VERSION):
            raise DamagedTransactionLog(f"version {version} of a record of {LOG} is not known")
        committed = {_PREPARE_COMMIT: True, _PREPARE_ABORT: False}.get(status)
        topics: list[Any] = []
        if committed is not None:
            flexible, rest = version == _FLEXIBLE_VERSION, BytesIO(value[struct.calcsize(">hqhib") :])
            topics = _TOPICS.decode(rest, version=version, compact=flexible, tagged=flexible) or []
        partitions = frozenset((each["topic"], number) for each in topics for number in each["partition_ids"] or ())
        return TransactionRecord(producer_id, status in _UNDER_WAY, committed, partitions)
    except DamagedTransactionLog:
        raise
    except (struct.error, ValueError) as error:
        raise DamagedTransactionLog(f"a record of {LOG} cannot be parsed: {error}") from error
