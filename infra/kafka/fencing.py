"""Fencing of the current holder of a transactional.id."""

from __future__ import annotations

from kafka import KafkaProducer
from kafka.errors import KafkaError

from infra.kafka.properties import ClientProperties
from infra.kafka.readiness import connection_problem


class CannotFence(RuntimeError):
    """Kafka does not respond, so missing heartbeats prove nothing."""


def fence(client: ClientProperties, transactional_id: str) -> None:
    """Abort the open transaction of `transactional_id` and make its holder's next commit fail. Raises CannotFence."""
    if (reason := connection_problem(client.admin(), timeout_s=2.0)) is not None:
        raise CannotFence(reason)
    try:
        producer = KafkaProducer(**client.producer(transactional_id=transactional_id, retry_backoff_ms=5))
        try:
            producer.init_transactions()
        finally:
            producer.close(timeout=1)
    except KafkaError as error:
        raise CannotFence(repr(error)) from error
