"""Where a group reads on: moved in a transaction of its own, which fences whoever runs under it."""

from __future__ import annotations

from collections.abc import Mapping

from kafka import OffsetAndMetadata, TopicPartition

from infra.kafka.admin import admin_client, committed_offsets
from infra.kafka.properties import ClientProperties
from infra.kafka.transactions import TransactionalProducer

TIMEOUT_MS = 10_000


def move_group(client: ClientProperties, group: str, topic: str, offsets: Mapping[int, int]) -> None:
    """Let `group` read `topic` on from `offsets`, by partition, when it starts next; what commits note stays.

    The transactional.id of a group of ours is its name: a process that runs under it can commit nothing any more, and
    is to be started again, or starts itself again. Raises KafkaError.
    """
    producer = TransactionalProducer(**client.producer(transactional_id=group, transaction_timeout_ms=TIMEOUT_MS))
    try:
        producer.init_transactions()
        with admin_client(client) as admin:  # after that: what the one before has committed is the last
            committed = committed_offsets(admin, group)
        places = {TopicPartition(topic, number): offset for number, offset in offsets.items()}
        producer.begin_transaction()
        producer.send_offsets_to_transaction(
            {
                place: OffsetAndMetadata(offset, committed[place].metadata if place in committed else "", -1)
                for place, offset in places.items()
            },
            group,
        )
        producer.commit_transaction()
    finally:
        producer.close(timeout=1)
