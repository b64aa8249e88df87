"""A transactional producer with bounded waits that never repeats a request of unknown outcome."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from kafka import KafkaProducer, TopicPartition
from kafka.errors import KafkaConnectionError, KafkaError, KafkaTimeoutError
from kafka.producer.transaction_manager import (
    AddOffsetsToTxnHandler,
    AddPartitionsToTxnHandler,
    EndTxnHandler,
    TxnOffsetCommitHandler,
)

from infra.kafka.client_patches import ProducerParts

_TRANSACTIONAL = (AddPartitionsToTxnHandler, AddOffsetsToTxnHandler, TxnOffsetCommitHandler, EndTxnHandler)
_RECONNECT_MS = 50
"""Pause after a failed connection to a coordinator, before it is looked up again."""
_MARGIN = 0.95
"""The part of the time-out that a transaction may take: the broker's timer started earlier."""


class TransactionInDoubt(KafkaError):
    """The connection broke while a transactional request was in flight: the broker may still execute it."""


class TransactionTooSlow(KafkaTimeoutError):
    """A transaction did not end within its time-out."""


class TransactionalProducer(KafkaProducer):
    """kafka-python's producer with three more guarantees.

    A transaction takes at most `transaction_timeout_ms`; then its outcome is unknown: KafkaTimeoutError. kafka-python
    itself forgets a request whose connection fails while it is being established, and waits for it without limit; here
    such a request, which was never sent, is sent again.

    A transactional request is sent at most once. kafka-python repeats one whose connection broke, under the same
    producer epoch; the first one may then reach the broker late, within the *next* transaction, and end it halfway
    (KIP-890). Here a broken connection fails the producer: the epoch of the next session makes the broker reject late
    requests.

    A transaction ends after all its records are written, also if the last one is sent while the thread that sends
    requests looks for the next.
    """

    def __init__(self, *, transaction_timeout_ms: int, **arguments: Any) -> None:
        super().__init__(transaction_timeout_ms=transaction_timeout_ms, **arguments)
        self._bound_s = transaction_timeout_ms / 1000 * _MARGIN
        self._deadline = 0.0
        self._connections: dict[Any, Any] = {}
        self._parts = ProducerParts.of(self)
        self._enqueue = self._parts.replace_enqueue(self._enqueue_once)
        self._parts.look_for_batches_when_locked()
        self._parts.client.await_ready = _returning_false(self._parts.client)

    def begin(self, partitions: Iterable[TopicPartition]) -> None:
        """Begin a transaction that writes to `partitions`, among others. Raises KafkaError."""
        self.begin_transaction()
        self._deadline = time.monotonic() + self._bound_s
        partitions = list(partitions)
        self._parts.request_metadata(partition.topic for partition in partitions)
        for partition in partitions:
            self._parts.transactions.maybe_add_partition_to_transaction(partition)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all records sent are in the log or have failed. Raises KafkaError."""
        try:
            super().flush(self._left_s() if timeout is None else timeout)
        except KafkaTimeoutError as error:
            raise self._too_slow() from error

    def send_offsets_to_transaction(self, offsets: Any, group_metadata: Any) -> None:
        """Add a group's offsets to the transaction. Raises KafkaError."""
        self._await(self._parts.transactions.send_offsets_to_transaction(offsets, group_metadata))

    def commit_transaction(self) -> None:
        """Commit the transaction. Raises KafkaError."""
        self._await(self._parts.transactions.begin_commit())
        self._deadline = 0.0

    def abort_transaction(self) -> None:
        """Abort the transaction. Raises KafkaError."""
        self._await(self._parts.transactions.begin_abort())
        self._deadline = 0.0

    def close(self, timeout: float | None = None, null_logger: bool = False) -> None:
        """End the thread after `timeout` seconds at most; records that are not sent by then are dropped.

        Raises KafkaError if there are any.
        """
        try:
            super().close(timeout, null_logger)
        finally:
            if "_parts" in vars(self):  # not if the constructor has failed
                self._parts.sender.force_close()  # kafka-python leaves it running after a time-out

    def reconnected(self) -> bool:
        """Whether a connection of the last call is closed or replaced: its broker may have restarted since."""
        before, self._connections = self._connections, self._parts.connections()
        return any(self._connections.get(node) is not connection for node, connection in before.items())

    @property
    def producer_id(self) -> int:
        """The id that Kafka has assigned to this transactional.id."""
        return int(self._parts.transactions.producer_id_and_epoch.producer_id)

    @property
    def failure(self) -> Exception | None:
        """The error that ended this producer; None while it is usable."""
        error: Exception | None = self._parts.transactions.last_error
        return error

    def _left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic()) if self._deadline else self._bound_s

    def _await(self, result: Any) -> None:
        self._parts.sender.wakeup()
        if not result.wait(timeout_ms=self._left_s() * 1000):
            raise self._too_slow()

    def _too_slow(self) -> KafkaTimeoutError:
        return TransactionTooSlow(
            f"the transaction did not end within {self._bound_s:g} s; if the link is slow or the transaction large, "
            "raise kafka.transaction_timeout_s"
        )

    def _enqueue_once(self, handler: Any) -> None:
        if isinstance(handler, _TRANSACTIONAL) and "on_complete" not in vars(handler):
            handler.on_complete = _failing_on_disconnect(handler)
        self._enqueue(handler)


def _returning_false(client: Any) -> Any:
    """The client's `await_ready`, changed to return False after a failed connection, as its caller expects.

    The sender repeats a request after False. After an exception it forgets the request, whose future never completes.
    """
    await_ready = client.await_ready

    def ready(node_id: Any, timeout_ms: float) -> bool:
        try:
            return bool(await_ready(node_id, timeout_ms=timeout_ms))
        except KafkaConnectionError:
            client.poll(timeout_ms=_RECONNECT_MS)
            return False

    return ready


def _failing_on_disconnect(handler: Any) -> Any:
    """The handler's `on_complete`, changed so that a broken connection is an error that ends the producer."""
    complete = handler.on_complete

    def on_complete(correlation_id: int, answer: Any) -> None:
        if isinstance(answer, KafkaConnectionError):
            request = handler.request.name if handler.request else "request"
            answer = TransactionInDoubt(f"the connection broke while {request} was in flight: {answer}")
        complete(correlation_id, answer)

    return on_complete
