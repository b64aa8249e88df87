"""Transactions of which a partition was never told that they ended: found, and ended as they had ended elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import ClusterAuthorizationFailedError, NotLeaderForPartitionError, TransactionCoordinatorFencedError
from kafka.producer.transaction_manager import TransactionState
from markers import wait_for_markers
from shard_sessions import make_shard, record, visible

from infra.kafka import hanging_transactions as hanging
from infra.kafka import open_transactions as open_transactions_module
from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker, BrokerConfig, start_broker
from infra.kafka.hanging_transactions import end_hanging_transactions
from infra.kafka.open_transactions import open_transactions, write_marker
from infra.kafka.session import Session, SessionLost


@pytest.fixture(scope="module")
def credulous(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker that takes a producer's word for what is in a transaction, so that one can be made that hangs."""
    said = {"transaction.partition.verification.enable": "false"}
    with start_broker(BrokerConfig(tmp_path_factory.mktemp("kafka"), overrides=said)) as broker:
        yield broker


@pytest.fixture
def topic(credulous: Broker, run_id: str) -> str:
    """A topic of its own for each test, of two partitions."""
    with admin_client(credulous.client()) as admin:
        create_topics(admin, [TopicSpec(run_id, 2)])
    return run_id


def hang(broker: Broker, topic: str, committed: bool) -> None:
    """A transaction that its coordinator has ended, with a record in partition 0 after the marker."""
    producer = KafkaProducer(**broker.client().producer(transactional_id=topic))
    producer.init_transactions()
    producer.begin_transaction()
    for partition in (0, 1):
        producer.send(topic, b"before", partition=partition)
    producer.flush()
    producer.commit_transaction() if committed else producer.abort_transaction()
    with admin_client(broker.client()) as admin:
        while open_transactions(admin, [topic]):  # a late marker would end the next one
            time.sleep(0.01)
    producer.begin_transaction()
    producer._transaction_manager._partitions_in_transaction.add(TopicPartition(topic, 0))
    producer.send(topic, b"in it", partition=0).get(10)
    producer.close()


def start_again(broker: Broker, topic: str) -> None:
    """Start its producer again, as a restarted pipeline does: the coordinator forgets the outcome."""
    producer = KafkaProducer(**broker.client().producer(transactional_id=topic))
    producer.init_transactions()
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


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("committed", [False, True])
def test_hanging_transactions_end_with_their_outcome(
    committed: bool, restarted: bool, credulous: Broker, topic: str
) -> None:
    hang(credulous, topic, committed)
    if restarted:
        start_again(credulous, topic)
    write(credulous, topic)
    before = [b"before"] if committed else []
    assert seen(credulous, topic) == before
    assert end_hanging_transactions(credulous.client()) == [f"{topic}-0"]
    assert seen(credulous, topic) == [*before, *([b"in it"] if committed else []), b"after it"]
    assert end_hanging_transactions(credulous.client()) == []


def test_end_hanging_transactions_keeps_ongoing_ones(credulous: Broker, topic: str) -> None:
    with KafkaProducer(**credulous.client().producer(transactional_id="under way")) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"in it", partition=0).get(10)
        assert end_hanging_transactions(credulous.client()) == []
        producer.commit_transaction()
    wait_for_markers(credulous.client(), topic)
    assert seen(credulous, topic) == [b"in it"]


def test_hanging_transactions_of_a_loading_coordinator_are_kept(
    credulous: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that loads its state knows no transaction, and its producer is about to commit."""
    with KafkaProducer(**credulous.client().producer(transactional_id="loading")) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"in it", partition=0).get(10)
        monkeypatch.setattr(open_transactions_module, "coordinators_view", lambda admin: {})
        monkeypatch.setattr(hanging, "coordinators_view", lambda admin: {})
        assert end_hanging_transactions(credulous.client()) == []
        producer.commit_transaction()
    monkeypatch.undo()
    wait_for_markers(credulous.client(), topic)
    assert seen(credulous, topic) == [b"in it"]


def test_broker_restart_ends_hanging_transactions(credulous: Broker, topic: str) -> None:
    hang(credulous, topic, True)
    credulous.stop()
    told: list[str] = []
    credulous.start(told.append)
    assert told[-1] == f"ended hanging transactions in {topic}-0"


def test_end_hanging_transactions_retries_after_a_move(
    credulous: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang(credulous, topic, True)
    errors = [NotLeaderForPartitionError("moved"), TransactionCoordinatorFencedError("ended by itself")]
    tell = hanging.write_marker

    def told(admin: Any, transaction: Any) -> None:
        if errors:
            raise errors.pop()
        tell(admin, transaction)

    monkeypatch.setattr(hanging, "write_marker", told)
    assert end_hanging_transactions(credulous.client(), sleep=lambda seconds: None) == [f"{topic}-0"]
    assert not errors


def test_open_transactions_distinguishes_hanging_ones(credulous: Broker, topic: str) -> None:
    hang(credulous, topic, False)
    other = f"{topic}-other"
    with admin_client(credulous.client()) as admin:
        create_topics(admin, [TopicSpec(other, 2)])
    with KafkaProducer(**credulous.client().producer(transactional_id="at work")) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(other, b"in it", partition=1).get(10)
        with admin_client(credulous.client()) as admin:
            found = open_transactions(admin, [topic, other])
            assert [(each.topic, each.partition, each.hangs) for each in found] == [
                (topic, 0, True),
                (other, 1, False),
            ]
            assert found[1].transactional_id == "at work"
            write_marker(admin, found[0])
            assert [each.topic for each in open_transactions(admin, [topic, other])] == [other]
        producer.abort_transaction()


def leave_open(session: Session) -> None:
    """Write a record of a transaction that the session's coordinator does not know."""
    config, producer = session.config, session._producer
    wait_for_markers(config.client, config.ledger[0].topic)  # a late one would end it
    producer.begin([])
    producer._transaction_manager._partitions_in_transaction.add(TopicPartition(*config.ledger[0]))
    producer.send(config.ledger[0].topic, b"open", partition=0).get(10)


def test_session_ends_its_hanging_transaction_at_the_start(credulous: Broker) -> None:
    """Otherwise its next transaction would commit the records of an aborted one, or the other way round."""
    config = make_shard(credulous, "hanging-shard")
    first = Session(config)
    first.commit([record(config, b"one")], {}, {}, {})
    leave_open(first)
    first.close()
    second = Session(config)  # the log has "commit" for the transaction before, which the open record seems part of
    assert visible(config, config.ledger[0].topic) == [b"one", b"open"]
    second.commit([record(config, b"two")], {}, {}, {})
    second.close()
    assert end_hanging_transactions(credulous.client()) == []


def test_session_does_not_open_if_it_may_not_end_its_transaction(
    credulous: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_shard(credulous, "denied-shard")
    first = Session(config)
    first.commit([record(config, b"one")], {}, {}, {})
    leave_open(first)
    first.close()

    def deny(admin: Any, transaction: Any) -> None:
        raise ClusterAuthorizationFailedError("denied")

    monkeypatch.setattr(open_transactions_module, "write_marker", deny)
    with pytest.raises(SessionLost, match=r"denied-shard is still open in denied-.* abort \d+ -b \S+ --execute`"):
        Session(config)
    assert end_hanging_transactions(credulous.client()) == ["denied-shard-out-0"]
    Session(config).close()


def test_session_ends_if_a_broker_restart_hangs_its_transaction(credulous: Broker) -> None:
    config = make_shard(credulous, "restarted-shard")
    session, other = Session(config), Session(replace(config, group="other"))
    for each in (session, other):
        each.commit([record(config, b"one")] if each is session else [], {}, {}, {})
    leave_open(session)
    session._producer._transaction_manager._transition_to(TransactionState.COMMITTING_TRANSACTION)
    session._producer._transaction_manager._complete_transaction()
    credulous.stop()
    credulous._end_hanging = lambda progress: None  # type: ignore[method-assign]
    credulous.start()
    with pytest.raises(SessionLost, match=r"restarted-shard is still open in restarted-shard-out-0"):
        session.commit([record(config, b"two")], {}, {}, {})
    del credulous._end_hanging
    end_hanging_transactions(credulous.client())
    other.commit([], {}, {}, {"after": "the restart"})  # nothing of it hangs
    for each in (session, other):
        each.close()
