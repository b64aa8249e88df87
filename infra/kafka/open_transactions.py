"""Open transactions of partitions, which block every read_committed reader: how they are seen and ended.

A producer must not write while an earlier transaction of its own has no end in a partition. Kafka ends all transactions
of a producer before its successor may begin. If it has lost a marker (see `hanging_transactions.py`), the earlier
records are still open in that partition, and the end of the next transaction would decide them too: aborted records
would become visible, or committed ones would be lost. So every start ends such transactions first, each with its
outcome; and every reconnected producer looks for them, because its broker may have restarted.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kafka import TopicPartition
from kafka.admin import AbortTransactionSpec, TransactionState
from kafka.errors import (
    AuthorizationError,
    KafkaError,
    KafkaTimeoutError,
    NotLeaderForPartitionError,
    UnsupportedVersionError,
)

from infra.clocks import wall_ms
from infra.kafka.admin import admin_client
from infra.kafka.client_patches import write_commit_marker
from infra.kafka.properties import ClientProperties
from infra.kafka.readiness import retry_transient
from infra.kafka.session_config import Partition
from infra.kafka.transaction_log import DamagedTransactionLog, LoggedProducer, logged_producers
from schemas.topics import run_of

ENDING = (TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT, TransactionState.PREPARE_EPOCH_FENCE)
_UNDER_WAY = (*ENDING, TransactionState.ONGOING)
LEADERS_S = 10.0
"""How long the leaders of partitions may be unknown: topics are new, or a broker has ended."""


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction that is open in one partition, from offset `first` on.

    `transactional_id` is None and `state` "Unknown" if no coordinator knows the producer. `wrote_at` is the time of the
    producer's last record there, in Unix milliseconds.
    """

    topic: str
    partition: int
    first: int
    producer_id: int
    epoch: int
    coordinator_epoch: int
    wrote_at: int
    transactional_id: str | None
    state: str
    committed: bool = False
    """Whether it was committed, see `decided`."""

    @property
    def hangs(self) -> bool:
        """Whether its coordinator has ended it or does not know it. `decided` tells whether it may end by itself."""
        return self.state not in {state.value for state in _UNDER_WAY}


def coordinators_view(admin: Any) -> dict[int, tuple[str, Any]]:
    """The transactions known to coordinators, by producer id: transactional id and description."""
    listed = {each.transactional_id for rows in admin.list_transactions().values() for each in rows}
    described = admin.describe_transactions(sorted(listed)) if listed else {}
    return {each.producer_id: (name, each) for name, each in described.items()}


def open_transactions(admin: Any, topics: Sequence[str]) -> list[OpenTransaction]:
    """The open transactions in the partitions of `topics`, sorted. Raises KafkaError."""
    places = [
        TopicPartition(topic["name"], partition["partition_index"])
        for topic in (admin.describe_topics(list(topics)) if topics else ())
        for partition in topic["partitions"]
    ]
    found = [
        (place, producer)
        for place, state in (admin.describe_producers(places) if places else {}).items()
        for producer in state.active_producers
        if producer.current_transaction_start_offset >= 0
    ]
    known = coordinators_view(admin) if found else {}
    return sorted(
        (_opened(place, producer, *known.get(producer.producer_id, (None, None))) for place, producer in found),
        key=lambda each: (each.topic, each.partition, each.first),
    )


def decided(client: ClientProperties, hanging: Iterable[OpenTransaction]) -> list[OpenTransaction]:
    """The transactions that hang according to the coordinators' log too, each with its outcome there.

    A coordinator that loads its state after a start does not know transactions that are under way: they are left out.
    One that is not in the log is aborted. Raises KafkaError, DamagedTransactionLog.
    """
    found = list(hanging)
    logged = logged_producers(client, {each.producer_id for each in found}) if found else {}
    return [
        replace(each, committed=producer.committed.get((each.topic, each.partition), False))
        for each in found
        if not (producer := logged.get(each.producer_id, LoggedProducer())).under_way
    ]


def write_marker(admin: Any, transaction: OpenTransaction) -> None:
    """End a hanging transaction with its outcome; abort one that no coordinator knows (KIP-664)."""
    place = TopicPartition(transaction.topic, transaction.partition)
    spec = AbortTransactionSpec(
        place, transaction.producer_id, transaction.epoch, max(0, transaction.coordinator_epoch)
    )
    if not transaction.committed:
        admin.abort_transaction(spec)
        return
    write_commit_marker(admin, spec, place)


def _opened(place: TopicPartition, producer: Any, name: str | None, known: Any) -> OpenTransaction:
    return OpenTransaction(
        topic=place.topic,
        partition=place.partition,
        first=producer.current_transaction_start_offset,
        producer_id=producer.producer_id,
        epoch=producer.producer_epoch,
        coordinator_epoch=producer.coordinator_epoch,
        wrote_at=producer.last_timestamp,
        transactional_id=name,
        state=TransactionState.UNKNOWN.value if known is None else known.state.value,
    )


STALLED_S = 30.0
"""How long a reader may make no progress before an open transaction is suspected."""
STALLED_POLLS = 10
"""How many polls, too: after a slow step much time has passed, but a poll has the records of some partitions only."""
REPORT_INTERVAL_S = 300.0
"""Minimum interval between two reports of a partition."""


class StallWatch:
    """Compares a reader's positions with the ends of the log."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[Partition, tuple[int, float, int]] = {}
        self._reported_at: dict[Partition, float] = {}

    def stalled(self, positions: Mapping[Partition, int], ends: Mapping[Partition, int | None]) -> list[Partition]:
        """Partitions without progress before their end for STALLED_S and STALLED_POLLS; each at most once every
        REPORT_INTERVAL_S. To be called after a poll.
        """
        now, found = self._clock(), []
        for place, position in positions.items():
            end = ends.get(place)
            before, since, polls = self._seen.get(place, (-1, now, 0))
            if end is None or position >= end or position != before:
                self._seen[place] = position, now, 0
                continue
            self._seen[place] = position, since, polls + 1
            is_stalled = now - since >= STALLED_S and polls + 1 >= STALLED_POLLS
            if is_stalled and now - self._reported_at.get(place, -REPORT_INTERVAL_S) >= REPORT_INTERVAL_S:
                self._reported_at[place] = now
                found.append(place)
        return found


def describe_blocking_transactions(client: ClientProperties, places: list[Partition]) -> list[str]:
    """The open transactions in `places` and the command that ends each, a line each; the error if the brokers cannot be
    asked.
    """
    try:
        with admin_client(client) as admin:
            found = open_transactions(admin, sorted({place.topic for place in places}))
    except KafkaError as error:
        return [f"{sorted(places)} cannot be read further, and its open transactions cannot be listed: {error!r}"]
    now_ms = wall_ms()
    return [
        f"{each.topic}, partition {each.partition}: a transaction of {each.transactional_id or 'an unknown producer'} "
        f"(producer {each.producer_id}) is open from offset {each.first} on; its last record is "
        f"{max(0, now_ms - each.wrote_at) / 1000:.0f} s old; if its producer does not end it: "
        f"`{_abort_command(each.producer_id, each.topic, client)}`"
        for each in found
        if (each.topic, each.partition) in places
    ]


def _abort_command(producer_id: int, topic: str, client: ClientProperties) -> str:
    run, entries = run_of(topic), client.entries
    options = [f"--run {run}"] if run else []
    options += [f"-b {shlex.quote(entries['bootstrap.servers'])}"] if "bootstrap.servers" in entries else []
    options += ["-F FILE"] if len(entries) > 1 else []  # it has a login
    return " ".join(["laminar topics transactions abort", str(producer_id), *options, "--execute"])


log = logging.getLogger(__name__)


def check_own_transactions(
    client: ClientProperties, group: str, producer_id: int, places: Collection[TopicPartition]
) -> None:
    """Raise KafkaTimeoutError if a transaction of `producer_id` is open in one of `places`.

    Nothing is checked on a cluster that denies the request (it needs READ on the topics) or does not know it.
    """
    if open_places := _open_places(client, group, producer_id, places):
        raise _unended(client, group, producer_id, open_places)


def end_own_transactions(
    client: ClientProperties, group: str, producer_id: int, places: Collection[TopicPartition]
) -> None:
    """End the transactions of `producer_id` that are open in `places`, as Kafka's transaction log has decided them.

    For a start that has fenced its predecessor: none of its transactions is under way. Raises KafkaTimeoutError if one
    cannot be ended, since the cluster does not permit it (CLUSTER_ACTION, and READ on `__transaction_state`).
    """
    open_places = _open_places(client, group, producer_id, places)
    if not open_places:
        return
    try:
        with admin_client(client) as admin:
            found = open_transactions(admin, sorted({place.topic for place in open_places}))
            own = [each for each in found if each.producer_id == producer_id]
            for each in decided(client, own):
                write_marker(admin, each)
                log.warning(
                    "%s: Kafka had lost the end of a transaction in %s, partition %d, offset %d: %s again",
                    group,
                    each.topic,
                    each.partition,
                    each.first,
                    "committed" if each.committed else "aborted",
                )
    except (AuthorizationError, DamagedTransactionLog) as error:
        raise _unended(client, group, producer_id, open_places) from error
    check_own_transactions(client, group, producer_id, open_places)


def _open_places(
    client: ClientProperties, group: str, producer_id: int, places: Collection[TopicPartition]
) -> list[TopicPartition]:
    try:
        with admin_client(client) as admin:
            states = retry_transient(
                lambda: admin.describe_producers(places) if places else {}, NotLeaderForPartitionError, LEADERS_S
            )
    except (AuthorizationError, UnsupportedVersionError) as error:
        log.debug("%s: open transactions are not checked: %r", group, error)
        return []
    return sorted(
        place
        for place, state in states.items()
        for each in state.active_producers
        if each.producer_id == producer_id and each.current_transaction_start_offset >= 0
    )


def _unended(
    client: ClientProperties, group: str, producer_id: int, places: Collection[TopicPartition]
) -> KafkaTimeoutError:
    command = _abort_command(producer_id, next(iter(places)).topic, client)
    where = ", ".join(f"{place.topic}-{place.partition}" for place in places)
    return KafkaTimeoutError(
        f"an earlier transaction of {group} is still open in {where}, although its coordinator has ended it; "
        f"`{command}` writes the missing markers"
    )
