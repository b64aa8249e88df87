"""Fencing: taking a transactional.id away from whoever holds it."""

from __future__ import annotations

from kafka import KafkaProducer

from infra.kafka.properties import ClientProperties


def fence(client: ClientProperties, transactional_id: str) -> None:
    """End the open transaction of `transactional_id` and make its holder's next commit fail. Raises KafkaError."""
    producer = KafkaProducer(**client.producer(transactional_id=transactional_id, retry_backoff_ms=5))
    try:
        producer.init_transactions()
    finally:
        producer.close(timeout=1)
