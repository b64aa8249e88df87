"""Transactions of which a partition was never told that they ended: found, and ended as they had ended elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import NotLeaderForPartitionError

from infra.kafka import hanging_transactions as hanging
from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker, BrokerConfig, start_broker
from infra.kafka.hanging_transactions import end_hanging_transactions
from infra.kafka.open_transactions import open_transactions, write_marker


@pytest.fixture(scope="module")
def credulous(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker that takes a producer's word for what is in a transaction, so that one can be made that hangs."""
    said = {"transaction.partition.verification.enable": "false"}
    with start_broker(BrokerConfig(tmp_path_factory.mktemp("kafka"), overrides=said)) as broker:
        with admin_client(broker.client()) as admin:
            create_topics(admin, [TopicSpec(name, 2) for name in ("committed", "aborted", "under-way")])
        yield broker


def hang(broker: Broker, topic: str, committed: bool) -> None:
    """A transaction over both partitions, of which its coordinator knows partition 1 alone."""
    producer = KafkaProducer(**broker.client().producer(transactional_id=topic))
    producer.init_transactions()
    producer.begin_transaction()
    producer._transaction_manager._partitions_in_transaction.add(TopicPartition(topic, 0))
    for partition in (0, 1):
        producer.send(topic, b"in it", partition=partition)
    producer.flush()
    producer.commit_transaction() if committed else producer.abort_transaction()
    producer.close()


def seen(broker: Broker, topic: str) -> list[bytes]:
    """The values of partition 0 that a reader of committed records gets to see by now."""
    place = TopicPartition(topic, 0)
    options = broker.client().consumer(isolation_level="read_committed", auto_offset_reset="earliest")
    with KafkaConsumer(**options) as consumer:
        consumer.assign([place])
        end = consumer.end_offsets([place])[place]
        values: list[bytes] = []
        while consumer.position(place) < end:
            values += [record.value for records in consumer.poll(1000).values() for record in records]
        return values


def write(broker: Broker, topic: str) -> None:
    with KafkaProducer(**broker.client().producer()) as producer:
        producer.send(topic, b"after it", partition=0).get(10)


@pytest.mark.parametrize(("topic", "expected"), [("committed", [b"in it", b"after it"]), ("aborted", [b"after it"])])
def test_hanging_transactions_end_with_coordinators_outcome(
    topic: str, expected: list[bytes], credulous: Broker
) -> None:
    hang(credulous, topic, topic == "committed")
    write(credulous, topic)
    assert seen(credulous, topic) == []
    assert end_hanging_transactions(credulous.client()) == [f"{topic}-0"]
    assert seen(credulous, topic) == expected
    assert end_hanging_transactions(credulous.client()) == []


def test_end_hanging_transactions_keeps_ongoing_ones(credulous: Broker) -> None:
    with KafkaProducer(**credulous.client().producer(transactional_id="under way")) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send("under-way", b"in it", partition=0).get(10)
        assert end_hanging_transactions(credulous.client()) == []
        producer.commit_transaction()
    assert seen(credulous, "under-way") == [b"in it"]


def test_broker_restart_ends_hanging_transactions(credulous: Broker) -> None:
    hang(credulous, "committed", True)
    credulous.stop()
    told: list[str] = []
    credulous.start(told.append)
    assert told[-1] == "ended hanging transactions in committed-0"


def test_end_hanging_transactions_retries_after_leader_move(credulous: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    hang(credulous, "committed", True)
    errors = [NotLeaderForPartitionError("moved"), NotLeaderForPartitionError("moved again")]
    tell = hanging.write_marker

    def told(admin: Any, transaction: Any) -> None:
        if errors:
            raise errors.pop()
        tell(admin, transaction)

    monkeypatch.setattr(hanging, "write_marker", told)
    assert end_hanging_transactions(credulous.client(), sleep=lambda seconds: None) == ["committed-0"]
    assert not errors


def test_open_transactions_distinguishes_hanging_ones(credulous: Broker) -> None:
    hang(credulous, "aborted", False)
    with KafkaProducer(**credulous.client().producer(transactional_id="at work")) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send("under-way", b"in it", partition=1).get(10)
        with admin_client(credulous.client()) as admin:
            found = open_transactions(admin, ["aborted", "under-way"])
            assert [(each.topic, each.partition, each.hangs) for each in found] == [
                ("aborted", 0, True),
                ("under-way", 1, False),
            ]
            assert found[1].transactional_id == "at work"
            write_marker(admin, found[0])
            assert [each.topic for each in open_transactions(admin, ["aborted", "under-way"])] == ["under-way"]
        producer.abort_transaction()
