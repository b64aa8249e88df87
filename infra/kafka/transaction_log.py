"""The outcomes of transactions, read from the coordinators' log `__transaction_state`.

A coordinator tells only the state of a producer's last transaction, and forgets it as soon as the producer starts
again. Its log has each outcome with the partitions of the transaction (Kafka's TransactionLogValue, versions 0 and 1).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from kafka import TopicPartition
from kafka.errors import KafkaTimeoutError

from infra.kafka.notes import uncommitted_consumer
from infra.kafka.properties import ClientProperties
from infra.kafka.record_batches import RecordBatch

LOG = "__transaction_state"
MAX_PARTITIONS = 100_000
"""Maximum partitions of one transaction; a larger number is a damaged record."""
POLL_MS = 100
MAX_IDLE_POLLS = 300
_PREPARE_COMMIT, _PREPARE_ABORT = 2, 3
_FLEXIBLE_VERSION = 1


class DamagedTransactionLog(ValueError):
    """A record of the log cannot be parsed."""


class Outcome(NamedTuple):
    """The decision to commit or abort the transaction of a producer over `partitions`."""

    producer_id: int
    committed: bool
    partitions: frozenset[tuple[str, int]]


def last_outcomes(client: ClientProperties, transactional_ids: Iterable[str]) -> dict[tuple[int, str, int], bool]:
    """Whether the last transaction of each producer in each partition was committed, by producer id, topic, partition.

    Only transactions of `transactional_ids` are searched. A transaction without a decision in the log is missing.
    Raises KafkaError, also if the log may not be read, and DamagedTransactionLog.
    """
    wanted = {name.encode() for name in transactional_ids}
    found: dict[tuple[int, str, int], bool] = {}
    observer = uncommitted_consumer(client)
    try:
        partitions = observer.partitions_for_topic(LOG) or set()
        places = [TopicPartition(LOG, partition_of(name, len(partitions))) for name in wanted] if partitions else []
        for batch in _batches(observer, list(dict.fromkeys(places))):
            for key, value in zip(batch.keys, batch.values, strict=True):
                if value is None or transactional_id(key or b"") not in wanted:
                    continue
                if (outcome := parse_outcome(value)) is not None:
                    found |= {(outcome.producer_id, *place): outcome.committed for place in outcome.partitions}
    finally:
        observer.close(autocommit=False)
    return found


def partition_of(transactional_id: bytes, partitions: int) -> int:
    """The partition of the log with the transactions of an id: the hash of a Java string, modulo `partitions`."""
    value = 0
    for unit in struct.iter_unpack(">H", transactional_id.decode().encode("utf-16-be")):
        value = (31 * value + unit[0]) & 0xFFFFFFFF
    return (value & 0x7FFFFFFF) % partitions


def transactional_id(key: bytes) -> bytes | None:
    """The transactional id in a key of the log; None for another kind of key."""
    if len(key) < 4 or key[:2] != b"\0\0":
        return None
    return key[4 : 4 + int.from_bytes(key[2:4])]


def parse_outcome(value: bytes) -> Outcome | None:
    """The outcome in a value of the log; None if it decides none. Raises DamagedTransactionLog."""
    try:
        version, producer_id, _epoch, _timeout_ms, status = struct.unpack_from(">hqhib", value)
        if status not in (_PREPARE_COMMIT, _PREPARE_ABORT):
            return None
        if version not in (0, _FLEXIBLE_VERSION):
            raise DamagedTransactionLog(f"version {version} of a record of {LOG} is not known")
        fields = _Fields(value, struct.calcsize(">hqhib"), flexible=version == _FLEXIBLE_VERSION)
        return Outcome(producer_id, status == _PREPARE_COMMIT, frozenset(fields.partitions()))
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise DamagedTransactionLog(f"a record of {LOG} cannot be parsed: {error}") from error


class _Fields:
    """Reads the array of topics and partitions at `at`. Flexible versions use variable-length counts and tags."""

    def __init__(self, data: bytes, at: int, *, flexible: bool) -> None:
        self._data, self._at, self._flexible = data, at, flexible

    def partitions(self) -> Iterator[tuple[str, int]]:
        for _ in range(self._count(">i")):
            length = self._count(">h")
            topic = self._data[self._at : self._at + length].decode()
            self._at += length
            for _ in range(self._count(">i")):
                yield topic, self._unpack(">i")
            self._skip_tags()

    def _count(self, fixed: str) -> int:
        """A length: 0 for null. Flexible versions encode the length plus one."""
        count = self._varint() - 1 if self._flexible else self._unpack(fixed)
        if count > MAX_PARTITIONS:
            raise DamagedTransactionLog(f"{count} elements in a record of {LOG}")
        return max(0, count)

    def _skip_tags(self) -> None:
        for _ in range(self._varint() if self._flexible else 0):
            self._varint()
            length = self._varint()
            self._at += length

    def _unpack(self, format_: str) -> int:
        (number,) = struct.unpack_from(format_, self._data, self._at)
        self._at += struct.calcsize(format_)
        return int(number)

    def _varint(self) -> int:
        number = 0
        for shift in range(0, 35, 7):
            byte = self._data[self._at]
            self._at += 1
            number |= (byte & 127) << shift
            if byte < 128:
                return number
        raise DamagedTransactionLog(f"a number of more than five bytes in a record of {LOG}")


def _batches(observer: Any, places: list[TopicPartition]) -> Iterator[RecordBatch]:
    """The batches of `places` to their present ends. Raises KafkaTimeoutError."""
    if not places:
        return
    ends = observer.end_offsets(places)
    begins = observer.beginning_offsets(places)
    observer.assign(places)
    for place in places:
        observer.seek(place, begins[place])
    idle = 0
    while any(observer.position(place) < end for place, end in ends.items()):
        polled = [record.value for records in observer.poll(timeout_ms=POLL_MS).values() for record in records]
        idle = 0 if polled else idle + 1
        if idle > MAX_IDLE_POLLS:
            raise KafkaTimeoutError(f"{LOG} cannot be read to its end")
        yield from (value for value in polled if isinstance(value, RecordBatch))
