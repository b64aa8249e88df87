"""Fencing of the current holder of a transactional.id."""

from __future__ import annotations

from kafka.errors import KafkaError

from infra.kafka.clients import SessionClients

_TIMEOUT_S = 1.0
"""Time-out of a transaction, as a producer must have one: a fence begins none. Brokers may bound it to the least value
of kafka.transaction_timeout_s."""


class CannotFence(RuntimeError):
    """Kafka does not respond, so missing heartbeats prove nothing."""


def fence(clients: SessionClients, transactional_id: str) -> None:
    """Abort the open transaction of `transactional_id` and make its holder's next commit fail. Raises CannotFence."""
    if (reason := clients.problem()) is not None:
        raise CannotFence(reason)
    try:
        producer = clients.producer(transactional_id, _TIMEOUT_S)
        try:
            producer.init_transactions()
        finally:
            producer.close(timeout=1)
    except KafkaError as error:
        raise CannotFence(repr(error)) from error
