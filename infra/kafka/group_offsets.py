"""Where a shard reads on: moved in a transaction of its own, which fences whoever runs under it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from kafka import OffsetAndMetadata, TopicPartition

from infra.kafka.note import Note
from infra.kafka.notes import last_note, uncommitted_consumer
from infra.kafka.properties import ClientProperties
from infra.kafka.session_config import Partition
from infra.kafka.transactions import TransactionalProducer
from schemas.codec import encode
from schemas.records import CommitNote

TIMEOUT_MS = 10_000


def set_group_offsets(
    client: ClientProperties, group: str, topic: str, offsets: Mapping[int, int], restore: Partition
) -> None:
    """Let `group` read `topic` on from `offsets`, by partition, when it starts next; what its note says else stays.

    The transactional.id of a group of ours is its name: a process that runs under it can commit nothing any more, and
    is to be started again, or starts itself again. Raises KafkaError.
    """
    producer = TransactionalProducer(**client.producer(transactional_id=group, transaction_timeout_ms=TIMEOUT_MS))
    try:
        producer.init_transactions()
        observer = uncommitted_consumer(client)
        try:  # after that: what the one before has committed is the last
            note = last_note(observer, TopicPartition(*restore), group) or Note()
        finally:
            observer.close(autocommit=False)
        named = {f"{topic}:{number}": offset for number, offset in offsets.items()}
        moved = replace(note, offsets={**note.offsets, **named}, commit=note.commit + 1, written={})
        value, headers = encode(CommitNote(group, moved.encode(), time.time_ns() // 10**6))
        producer.begin([TopicPartition(*restore)])
        producer.send(restore.topic, value, group.encode(), list(headers), restore.partition)
        places = {TopicPartition(topic, number): offset for number, offset in offsets.items()}
        producer.send_offsets_to_transaction(
            {place: OffsetAndMetadata(offset, "", -1) for place, offset in places.items()}, group
        )
        producer.commit_transaction()
    finally:
        producer.close(timeout=1)
