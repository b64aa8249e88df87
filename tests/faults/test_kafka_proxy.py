"""Each fault of the proxy has its effect and is in the proxy's log."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
from faults.kafka_frames import Api
from faults.kafka_proxy import KafkaProxy
from faults.log_files import LoggedRecord, read_topic
from faults.proxied_broker import ProxiedBroker
from faults.request_faults import Delay, Duplicate, LateRequest, LostRequest, LostResponse, Match, before_request
from kafka import KafkaConsumer, KafkaProducer, TopicPartition

from infra.kafka.admin import TopicSpec, admin_client, create_topics

PRODUCE = Match([Api.PRODUCE])


@pytest.fixture
def topic(proxied: ProxiedBroker, run_id: str) -> Iterator[str]:
    with admin_client(proxied.direct) as admin:
        create_topics(admin, [TopicSpec(run_id, 1)])
    yield run_id
    proxied.proxy.clear()


@pytest.fixture
def producer(proxied: ProxiedBroker) -> Iterator[KafkaProducer]:
    """Not idempotent: a duplicated request is written twice."""
    with KafkaProducer(**proxied.proxied.producer(enable_idempotence=False, linger_ms=0, metrics_enabled=False)) as it:
        yield it


def logged(proxied: ProxiedBroker, topic: str) -> list[LoggedRecord]:
    return read_topic(proxied.broker.config.data_dir / "log", topic)


def send(producer: KafkaProducer, topic: str, value: bytes = b"x") -> float:
    """Seconds until the acknowledgement."""
    began = time.monotonic()
    producer.send(topic, value).get(30)
    return time.monotonic() - began


def test_delay_delays_a_request(proxied: ProxiedBroker, producer: KafkaProducer, topic: str) -> None:
    send(producer, topic)
    delay = proxied.proxy.add(Delay(PRODUCE, 0.3))
    assert send(producer, topic) >= 0.3
    assert (delay.hits, delay.delayed_s >= 0.3) == (1, True)


def test_duplicate_is_written_twice(proxied: ProxiedBroker, producer: KafkaProducer, topic: str) -> None:
    duplicate = proxied.proxy.add(Duplicate(PRODUCE))
    send(producer, topic, b"twice")
    assert duplicate.hits == 1
    assert [record.value for record in logged(proxied, topic)] == [b"twice"] * 2


@pytest.mark.parametrize(("fault", "copies"), [(LostRequest, 1), (LostResponse, 2)])
def test_client_retries_a_lost_request_or_response(
    proxied: ProxiedBroker, producer: KafkaProducer, topic: str, fault: type, copies: int
) -> None:
    lost = proxied.proxy.add(fault(PRODUCE))
    send(producer, topic, b"again")
    assert lost.hits == 1
    assert [record.value for record in logged(proxied, topic)] == [b"again"] * copies


def test_late_request_is_delivered_after_later_requests(
    proxied: ProxiedBroker, producer: KafkaProducer, topic: str
) -> None:
    late = proxied.proxy.add(LateRequest(PRODUCE, before_request(2)))
    send(producer, topic, b"first")
    send(producer, topic, b"second")
    assert late.released.is_set()
    assert [record.value for record in logged(proxied, topic)] == [b"first", b"first", b"second"]


def test_throttle_bounds_the_bandwidth(proxied: ProxiedBroker, producer: KafkaProducer, topic: str) -> None:
    send(producer, topic)
    began = time.monotonic()  # before: the link is free from then on, and catches up if the request comes late
    proxied.proxy.throttle(400_000)
    send(producer, topic, bytes(200_000))
    assert time.monotonic() - began >= 0.4
    assert proxied.proxy.upstream_pace.bytes >= 200_000


def test_proxy_closes_clients_of_a_stopped_broker() -> None:
    with KafkaProxy(("127.0.0.1", 9)) as proxy, socket.create_connection(proxy.address, 10) as client:
        assert client.recv(1) == b""


def test_log_files_show_transaction_outcomes(proxied: ProxiedBroker, topic: str) -> None:
    with KafkaProducer(**proxied.direct.producer(transactional_id=topic)) as producer:
        producer.init_transactions()
        for value, end in ((b"a", producer.commit_transaction), (b"b", producer.abort_transaction)):
            producer.begin_transaction()
            producer.send(topic, value, key=b"k", headers=[("h", b"1")]).get(10)
            end()
        producer.begin_transaction()
        producer.send(topic, b"c").get(10)
        found = logged(proxied, topic)
        assert [(r.value, r.outcome) for r in found] == [(b"a", "committed"), (b"b", "aborted"), (b"c", "open")]
        assert (found[0].key, found[0].headers, found[0].offset) == (b"k", (("h", b"1"),), 0)
        producer.commit_transaction()
    consumer = KafkaConsumer(**proxied.direct.consumer(group_id=None, isolation_level="read_committed"))
    try:
        consumer.assign([TopicPartition(topic, 0)])
        consumer.seek_to_beginning()
        seen: list[bytes] = []
        deadline = time.monotonic() + 30
        while len(seen) < 2 and time.monotonic() < deadline:
            seen += [r.value for records in consumer.poll(timeout_ms=100).values() for r in records]
    finally:
        consumer.close(autocommit=False)
    assert seen == [r.value for r in logged(proxied, topic) if r.outcome == "committed"] == [b"a", b"c"]
