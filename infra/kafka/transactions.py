"""A transactional producer whose calls end."""

from __future__ import annotations

from typing import Any

from kafka import KafkaProducer
from kafka.errors import KafkaTimeoutError


class TransactionalProducer(KafkaProducer):
    """kafka-python's producer, with a bound on how long the requests of a transaction may take.

    When its coordinator's connection breaks while it is being made, kafka-python 3.0 forgets the request that waits for
    it, and the caller waits for ever. Past the bound a transaction's outcome is unknown: KafkaTimeoutError.
    """

    def __init__(self, *, transaction_timeout_ms: int, **arguments: Any) -> None:
        super().__init__(transaction_timeout_ms=transaction_timeout_ms, **arguments)
        self._bound_ms = transaction_timeout_ms  # the broker aborts what takes longer

    def send_offsets_to_transaction(self, offsets: Any, group_metadata: Any) -> None:
        """Make a group's offsets part of the transaction. Raises KafkaError."""
        self._await(self._transaction_manager.send_offsets_to_transaction(offsets, group_metadata))

    def commit_transaction(self) -> None:
        """Commit the transaction. Raises KafkaError."""
        self._await(self._transaction_manager.begin_commit())

    def _await(self, result: Any) -> None:
        self._sender.wakeup()
        if not result.wait(timeout_ms=self._bound_ms):
            raise KafkaTimeoutError(f"no answer from the transaction coordinator in {self._bound_ms} ms")
