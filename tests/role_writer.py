"""Writes records as the sink of a role does: in a transaction."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from typing import Any

from kafka import KafkaProducer
from markers import wait_for_markers

from infra.kafka.properties import ClientProperties
from schemas.codec import encode
from schemas.topics import Topic


def write_as_role(client: ClientProperties, run: str, topic: Topic, records: Iterable[Any], **at: Any) -> None:
    """Write `records` to `topic`, and wait until readers see them; `at` may have `partition` (by default 0),
    `timestamp_ms` and `key`.
    """
    with closing(KafkaProducer(**client.producer(transactional_id=f"{run}-test-role"))) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        for record in records:
            value, headers = encode(record)
            producer.send(topic.name(run), value, headers=list(headers), **{"partition": 0, **at})
        producer.commit_transaction()
    wait_for_markers(client, topic.name(run))
