"""Each fault of the proxy has its effect and is in the proxy's log."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from faults.kafka_frames import TRANSACTIONAL, Api, Request, error_code_of
from faults.kafka_proxy import KafkaProxy
from faults.log_files import LoggedRecord, read_topic
from faults.proxied_broker import ProxiedBroker
from faults.request_faults import Delay, Duplicate, LateRequest, LostRequest, LostResponse, Match, before_request
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.protocol.producer import (
    AddOffsetsToTxnResponse,
    AddPartitionsToTxnResponse,
    EndTxnResponse,
    InitProducerIdResponse,
    ProduceResponse,
    TxnOffsetCommitResponse,
)

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


def response_to(api: Api, version: int, codes: list[list[int]]) -> bytes:
    """A response as kafka-python encodes it: the error code of each partition of each topic."""
    topic: Any
    if api == Api.PRODUCE:
        topic = ProduceResponse.TopicProduceResponse
        rest: dict[str, Any] = {"base_offset": 3, "log_append_time_ms": -1, "log_start_offset": 0, "record_errors": []}
        if version >= 8:
            error = topic.PartitionProduceResponse.BatchIndexAndErrorMessage(1, "no")
            rest |= {"record_errors": [error], "error_message": "none"}
        parts = [
            [topic.PartitionProduceResponse(index=n, error_code=code, **rest) for n, code in enumerate(of)]
            for of in codes
        ]
        response = ProduceResponse(responses=[topic(name="topic", partition_responses=each) for each in parts])
    elif api == Api.TXN_OFFSET_COMMIT:
        topic = TxnOffsetCommitResponse.TxnOffsetCommitResponseTopic
        parts = [[topic.TxnOffsetCommitResponsePartition(n, code) for n, code in enumerate(of)] for of in codes]
        response = TxnOffsetCommitResponse(topics=[topic(name="topic", partitions=each) for each in parts])
    elif api == Api.ADD_PARTITIONS_TO_TXN:
        topic = AddPartitionsToTxnResponse.AddPartitionsToTxnTopicResult
        parts = [[topic.AddPartitionsToTxnPartitionResult(n, code) for n, code in enumerate(of)] for of in codes]
        topics = [topic(name="topic", results_by_partition=each) for each in parts]
        response = AddPartitionsToTxnResponse(results_by_topic_v3_and_below=topics)
    else:
        kinds = {Api.INIT_PRODUCER_ID: InitProducerIdResponse, Api.ADD_OFFSETS_TO_TXN: AddOffsetsToTxnResponse}
        response = kinds.get(api, EndTxnResponse)(error_code=codes[-1][-1])
    response.throttle_time_ms = 7
    tags = b"\0" if response.flexible_version_q(version) else b""
    return bytes(8) + tags + bytes(response.encode(version=version))


LATEST = {
    Api.PRODUCE: 12,
    Api.INIT_PRODUCER_ID: 4,
    Api.ADD_PARTITIONS_TO_TXN: 3,
    Api.ADD_OFFSETS_TO_TXN: 4,
    Api.TXN_OFFSET_COMMIT: 5,
    Api.END_TXN: 4,
}
"""The last version whose response is parsed; clients send no later one."""


@pytest.mark.parametrize("api", TRANSACTIONAL, ids=lambda api: api.name.lower())
def test_error_code_is_found_in_each_version(api: Api) -> None:
    for version in range(3 if api == Api.PRODUCE else 0, LATEST[api] + 1):
        request = Request(api, version, 1, "id", b"")
        assert error_code_of(request, response_to(api, version, [[0, 0], [0]])) == 0
        assert error_code_of(request, response_to(api, version, [[0, 0], [0, 90]])) == 90
    assert error_code_of(Request(Api.FETCH, 4, 1, None, b""), b"") is None
