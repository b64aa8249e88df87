"""What tests of sessions do with a shard of one input and one output that is its ledger."""

from __future__ import annotations

import time
from collections.abc import Callable

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from markers import wait_for_markers

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from infra.kafka.session import Outgoing, Partition, Session
from infra.kafka.session_config import Input, SessionConfig
from schemas.codec import encode
from schemas.records import CommitNote


def make_shard(broker: Broker, run_id: str) -> SessionConfig:
    """One input, one output that is the ledger, and a place for notes, each of one partition."""
    client = ClientProperties.at(broker.bootstrap_servers)
    restore = TopicSpec(f"{run_id}-restore", 1, config={"cleanup.policy": "compact"})
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(f"{run_id}-in", 1), TopicSpec(f"{run_id}-out", 1), restore])
    inputs, output = (Input(f"{run_id}-in", (0,)),), Partition(f"{run_id}-out", 0)
    return SessionConfig(client, run_id, inputs, Partition(restore.name, 0), ledger=(output,))


Open = Callable[[SessionConfig], Session]


def named(place: Partition) -> str:
    return f"{place.topic}:{place.partition}"


def source(config: SessionConfig) -> Partition:
    return Partition(config.inputs[0].topic, 0)


def record(config: SessionConfig, value: bytes) -> Outgoing:
    return Outgoing(config.ledger[0].topic, 0, None, value, [])


def feed(config: SessionConfig, *values: bytes) -> None:
    producer = KafkaProducer(**config.client.producer())
    for value in values:
        producer.send(source(config).topic, value)
    producer.flush()
    producer.close()


def visible(config: SessionConfig, topic: str) -> list[bytes]:
    """The values in a topic, to its end as it is now, that are committed. No transaction in it may be open."""
    wait_for_markers(config.client, topic)
    consumer = KafkaConsumer(**config.client.consumer(group_id=None, isolation_level="read_committed"))
    partition = TopicPartition(topic, 0)
    consumer.assign([partition])
    consumer.seek_to_beginning(partition)
    end, values = consumer.end_offsets([partition])[partition], []
    while consumer.position(partition) < end:
        values += [r.value for records in consumer.poll(timeout_ms=50).values() for r in records]
    consumer.close()
    return values


def polled(session: Session, count: int) -> list[bytes]:
    """The next values, at least `count` of them."""
    values: list[bytes] = []
    deadline = time.monotonic() + 60
    while len(values) < count and time.monotonic() < deadline:
        values += [r.value for r in session.poll(0.1)]
    return values


def write_note(config: SessionConfig, text: str | bytes) -> None:
    """Write a note, or a value that is none, under the shard's key in a transaction of another program."""
    value, headers = encode(CommitNote(config.group, text if isinstance(text, str) else "", 0))
    producer = KafkaProducer(**config.client.producer(transactional_id=f"{config.group}-other"))
    producer.init_transactions()
    producer.begin_transaction()
    written = text if isinstance(text, bytes) else value
    producer.send(config.restore.topic, written, config.group.encode(), list(headers), 0)
    producer.commit_transaction()
    producer.close()
    wait_for_markers(config.client, config.restore.topic)
