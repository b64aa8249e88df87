"""A transaction's calls end, whatever becomes of the coordinator's answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from kafka import OffsetAndMetadata, TopicPartition
from kafka.errors import KafkaTimeoutError
from kafka.producer.record_accumulator import RecordAccumulator
from kafka.producer.transaction_manager import TransactionalRequestResult

from infra.kafka import clients
from infra.kafka.admin import TopicSpec, admin_client, committed_offsets, create_topics, end_offsets
from infra.kafka.broker import Broker, BrokerConfig, start_broker
from infra.kafka.clients import KafkaClients
from infra.kafka.properties import ClientProperties
from infra.kafka.transactions import TransactionalProducer


def test_transaction_asks_for_its_topics_when_it_begins(broker: Broker, run_id: str) -> None:
    client, topic = ClientProperties.at(broker.bootstrap_servers), f"{run_id}.new"
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(topic, 1)])
    producer = KafkaClients(client).producer(run_id, 20.0)
    producer.init_transactions()
    producer.begin([TopicPartition(topic, 0)])
    deadline = time.monotonic() + 20
    while not producer._metadata.partitions_for_topic(topic):  # no record is sent
        assert time.monotonic() < deadline
        time.sleep(0.01)
    producer.close(timeout=1)


def test_transaction_does_not_end_before_its_last_record(
    broker: Broker, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that sends requests may look for records just before another sends one and commits."""
    client = ClientProperties.at(broker.bootstrap_servers)
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(run_id, 1)])
    producer = KafkaClients(client).producer(run_id, 20.0)
    waiting, looked, committing = (threading.Event() for _ in range(3))
    has_incomplete = RecordAccumulator.has_incomplete.fget

    def look(accumulator: RecordAccumulator) -> bool:
        found = bool(has_incomplete(accumulator))
        if waiting.is_set() and not found and threading.current_thread() is producer._sender:
            waiting.clear()
            looked.set()
            committing.wait(1.0)
        return found

    monkeypatch.setattr(RecordAccumulator, "has_incomplete", property(look))
    begin_commit = producer._transaction_manager.begin_commit

    def enqueue_end() -> TransactionalRequestResult:
        result = begin_commit()
        committing.set()
        return result

    monkeypatch.setattr(producer._transaction_manager, "begin_commit", enqueue_end)
    producer.init_transactions()
    producer.begin([])
    first = producer.send(run_id, b"first", partition=0)
    producer.flush()
    waiting.set()
    producer._sender.wakeup()
    assert looked.wait(10)
    last = producer.send(run_id, b"last", partition=0)
    producer.commit_transaction()
    assert [first.get(timeout=0).offset, last.get(timeout=0).offset] == [0, 1]
    producer.close(timeout=1)


@pytest.mark.parametrize("lost", ["begin_commit", "send_offsets_to_transaction"])
def test_transaction_times_out_on_lost_response(broker: Broker, run_id: str, lost: str) -> None:
    client = ClientProperties.at(broker.bootstrap_servers)
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(run_id, 1)])
        committed_offsets(admin, run_id)  # a new broker creates its topic of group offsets at the first request
    producer = TransactionalProducer(transaction_timeout_ms=20_000, **client.producer(transactional_id=run_id))
    try:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(run_id, b"whole").get(timeout=10)
        producer.send_offsets_to_transaction({}, run_id)
        producer.commit_transaction()  # without trouble it is as ever
        producer.begin_transaction()
        setattr(producer._transaction_manager, lost, lambda *arguments: TransactionalRequestResult())
        calls = {
            "begin_commit": producer.commit_transaction,
            "send_offsets_to_transaction": lambda: producer.send_offsets_to_transaction({}, run_id),
        }
        assert producer._bound_s == 19.0
        producer._bound_s = 0.95
        began = time.monotonic()
        with pytest.raises(KafkaTimeoutError, match="did not end within"):
            calls[lost]()
        assert 0.9 <= time.monotonic() - began < 30.0
    finally:
        producer.close(timeout=1)


@pytest.fixture(scope="module")
def stopped_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker of this file's own, for it is stopped."""
    with start_broker(BrokerConfig(tmp_path_factory.mktemp("kafka"))) as running:
        yield running


@pytest.mark.parametrize(("timeout_s", "delivery_ms"), [(60, 120_000), (300, 300_000)])
def test_records_may_take_as_long_as_their_transaction(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float, delivery_ms: int
) -> None:
    monkeypatch.setattr(clients, "TransactionalProducer", lambda **arguments: arguments)
    made = KafkaClients(ClientProperties.at("localhost:1")).producer("shard", timeout_s)
    assert made["delivery_timeout_ms"] == delivery_ms


@pytest.mark.parametrize("call", ["send_offsets", "commit"])  # no request is in flight before these
def test_transaction_continues_after_refused_connections(stopped_broker: Broker, run_id: str, call: str) -> None:
    """A coordinator that refuses connections delays each call until it is back. It does not time out."""
    broker = stopped_broker
    with ThreadPoolExecutor(1) as other:
        client = ClientProperties.at(broker.bootstrap_servers)
        with admin_client(client) as admin:
            create_topics(admin, [TopicSpec(run_id, 1)])
        producer = TransactionalProducer(
            transaction_timeout_ms=120_000, reconnect_backoff_max_ms=500, **client.producer(transactional_id=run_id)
        )
        place, moved = TopicPartition(run_id, 0), OffsetAndMetadata(0, "", -1)
        calls: dict[str, Callable[[], object]] = {
            "begin": lambda: producer.begin([place]),
            "flush": lambda: (producer.send(run_id, b"record", partition=0), producer.flush()),
            "send_offsets": lambda: producer.send_offsets_to_transaction({place: moved}, run_id),
            "commit": producer.commit_transaction,
        }
        try:
            producer.init_transactions()
            for name, step in calls.items():
                if name != call:
                    step()
                    continue
                broker.stop()
                stepped = other.submit(step)
                time.sleep(1.0)  # connections are refused meanwhile
                broker.start()
                stepped.result(timeout=120)
        finally:
            producer.close(timeout=1)
        with admin_client(client) as admin:
            assert end_offsets(admin, [run_id], committed=False)[place] >= 1
