"""What a session gets from outside: the Kafka clients of its process, its clocks and its lock.

`KafkaClients` connects to Kafka. A simulated process has clients of a cluster in memory and a simulated clock, so that
the same session runs in both.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from kafka import KafkaConsumer, TopicPartition

from infra.clocks import wall_ms
from infra.kafka.admin import admin_client, committed_offsets
from infra.kafka.client_patches import all_fetches_under_way, request_metadata_at_once
from infra.kafka.note import uncommitted_consumer
from infra.kafka.open_transactions import check_own_transactions, describe_blocking_transactions, end_own_transactions
from infra.kafka.properties import ClientProperties
from infra.kafka.readiness import connection_problem
from infra.kafka.session_config import Partition
from infra.kafka.transactions import TransactionalProducer

MAX_POLL_RECORDS = 2000
RETRY_BACKOFF_MS = 3
"""A transaction that begins before the markers of the last one are written must retry: soon, not after 100 ms."""
RECONNECT = {"reconnect_backoff_max_ms": 500}
"""Reconnect to a restarted broker within half a second (default 30 s), unless the client properties set it."""

DELIVERY_MS = 120_000
"""How long a record may wait and be retried, at least: all records of a transaction are enqueued at its beginning."""

FULL_POLL_S = 0.5
"""How often a consumer that is polled without waiting does all that belongs to a poll: errors, offset validation."""


class SessionConsumer(KafkaConsumer):
    """A consumer whose polls without a wait cost little while all its fetches are under way: a busy step makes many."""

    _polled_at = -math.inf

    def poll(self, timeout_ms: float = 0, **options: Any) -> Any:
        """As KafkaConsumer's."""
        now = time.monotonic()
        if not timeout_ms and now - self._polled_at < FULL_POLL_S and all_fetches_under_way(self):
            return {}
        self._polled_at = now
        return super().poll(timeout_ms, **options)


class Lock(AbstractContextManager[bool], Protocol):
    """A lock between the threads of one process, as threading.Lock."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; False if it was not free within `timeout` seconds."""

    def release(self) -> None:
        """Free the lock."""


class SessionClients(Protocol):
    """Clients, clocks and locks of the process of a session. The clients have the methods of kafka-python's."""

    def problem(self) -> str | None:
        """Why no broker can be reached; None if one responds."""

    def producer(self, transactional_id: str, transaction_timeout_s: float) -> Any:
        """A `TransactionalProducer`, not yet initialised."""

    def consumer(self) -> Any:
        """A read_committed consumer without a group; a position outside the log is an error."""

    def observer(self) -> Any:
        """A consumer of batches and markers that reads open transactions too, see `uncommitted_consumer`."""

    def committed(self, group: str) -> Mapping[TopicPartition, int]:
        """The offsets that `group` has committed, as Kafka's tools show them."""

    def check_own_transactions(self, group: str, producer_id: int, places: Collection[TopicPartition]) -> None:
        """Raise KafkaTimeoutError if a transaction of `producer_id` is open in one of `places`."""

    def end_own_transactions(self, group: str, producer_id: int, places: Collection[TopicPartition]) -> None:
        """End the transactions of `producer_id` that are open in `places`, see `open_transactions`."""

    def blocking(self, places: Sequence[TopicPartition]) -> Sequence[str]:
        """A line for each open transaction in `places`, with its producer and the command that ends it."""

    def lock(self) -> Lock:
        """A new lock."""

    def monotonic(self) -> float:
        """Seconds of a clock that never goes back."""

    def unix_ms(self) -> int:
        """The time of day in Unix milliseconds."""

    def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""


class KafkaClients:
    """Clients of a Kafka cluster, and the clocks of this machine."""

    def __init__(self, client: ClientProperties) -> None:
        self._client = client

    def problem(self) -> str | None:
        return connection_problem(self._client.admin(), timeout_s=2.0)

    def producer(self, transactional_id: str, transaction_timeout_s: float) -> TransactionalProducer:
        given, transaction_ms = self._client.producer(), int(transaction_timeout_s * 1000)
        own = (int(given.get(name, 0)) for name in ("delivery_timeout_ms", "request_timeout_ms"))
        return TransactionalProducer(
            **RECONNECT
            | self._client.producer(
                transactional_id=transactional_id,
                transaction_timeout_ms=transaction_ms,
                delivery_timeout_ms=max(DELIVERY_MS, transaction_ms, *own),
                acks="all",
                linger_ms=0,
                retry_backoff_ms=RETRY_BACKOFF_MS,
                batch_size=1 << 20,
                metrics_enabled=False,
                max_request_size=16 * 1024 * 1024,
            )
        )

    def consumer(self) -> KafkaConsumer:
        # Without a group: in a group each poll checks the coordinator in another thread, half the cost of a poll.
        consumer = SessionConsumer(
            **RECONNECT
            | self._client.consumer(
                group_id=None,
                enable_auto_commit=False,
                isolation_level="read_committed",
                auto_offset_reset="none",  # a position outside the log is an error, never skipped
                max_poll_records=MAX_POLL_RECORDS,
                fetch_max_wait_ms=500,
                metrics_enabled=False,
            )
        )
        request_metadata_at_once(consumer)
        return consumer

    def observer(self) -> KafkaConsumer:
        return uncommitted_consumer(self._client)

    def committed(self, group: str) -> Mapping[TopicPartition, int]:
        with admin_client(self._client) as admin:
            return {place: each.offset for place, each in committed_offsets(admin, group).items()}

    def check_own_transactions(self, group: str, producer_id: int, places: Collection[TopicPartition]) -> None:
        check_own_transactions(self._client, group, producer_id, places)

    def end_own_transactions(self, group: str, producer_id: int, places: Collection[TopicPartition]) -> None:
        end_own_transactions(self._client, group, producer_id, places)

    def blocking(self, places: Sequence[TopicPartition]) -> Sequence[str]:
        return describe_blocking_transactions(self._client, [Partition(*place) for place in places])

    def lock(self) -> Lock:
        return threading.Lock()

    def monotonic(self) -> float:
        return time.monotonic()

    def unix_ms(self) -> int:
        return wall_ms()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
