"""The bounded producer on a real broker: one that answers, one that is paused, one that is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from kafka import KafkaConsumer, TopicPartition
from waiting import until

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker, BrokerConfig, free_port, start_broker
from infra.kafka.producer import BoundedProducer, DeliveryFailed
from infra.kafka.properties import ClientProperties

KILOBYTE = bytes(1000)


@pytest.fixture(scope="module")
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker of this file's own, for it is paused: its session lasts longer than a pause."""
    session = {"broker.session.timeout.ms": "60000"}
    with start_broker(BrokerConfig(tmp_path_factory.mktemp("kafka"), overrides=session)) as running:
        yield running


class PausedBroker:
    """Pauses and resumes the broker's process."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)

    def suspend(self) -> None:
        """Return when every thread has stopped: one that still runs could answer a request."""
        self._process.suspend()
        while not all(self._state(thread.id) == "T" for thread in self._process.threads()):
            time.sleep(0.001)

    def resume(self) -> None:
        self._process.resume()

    def _state(self, thread: int) -> str:
        return Path(f"/proc/{self._process.pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def paused(own_broker: Broker) -> Iterator[PausedBroker]:
    """It goes on after the test in any case."""
    broker = PausedBroker(own_broker.pid)
    yield broker
    broker.resume()


def topic_on(broker: Broker, name: str) -> ClientProperties:
    client = ClientProperties.at(broker.bootstrap_servers)
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(name, 1)])
    return client


def values_in(client: ClientProperties, topic: str) -> list[bytes]:
    partition = TopicPartition(topic, 0)
    consumer = KafkaConsumer(**client.consumer(enable_auto_commit=False))
    consumer.assign([partition])
    consumer.seek_to_beginning(partition)
    end, found = consumer.end_offsets([partition])[partition], []
    while consumer.position(partition) < end:
        found += [record for polled in consumer.poll(1000).values() for record in polled]
    consumer.close()
    return found


def test_producer_delivers_records_in_order(broker: Broker, run_id: str) -> None:
    client = topic_on(broker, run_id)
    with BoundedProducer(client, max_bytes_in_flight=5000) as producer:
        for number in range(200):
            producer.send(run_id, KILOBYTE, key=str(number).encode(), headers=[("n", b"%d" % number)])
            assert producer.bytes_in_flight <= 5000
        producer.flush(10)
        assert producer.bytes_in_flight == 0
        producer.send(run_id, b"last", partition=0)
    records = values_in(client, run_id)
    assert [(r.key, r.value, r.headers) for r in records] == [
        *((str(n).encode(), KILOBYTE, [("n", b"%d" % n)]) for n in range(200)),
        (None, b"last", []),
    ]


def test_producer_send_waits_over_the_bound(own_broker: Broker, paused: PausedBroker, run_id: str) -> None:
    client = topic_on(own_broker, run_id)
    sent: list[int] = []
    with BoundedProducer(client, max_bytes_in_flight=5000) as producer:
        producer.send(run_id, b"first")
        producer.flush(10)
        paused.suspend()

        def send_all() -> None:
            for number in range(8):
                producer.send(run_id, KILOBYTE)
                sent.append(number)

        sender = threading.Thread(target=send_all)
        sender.start()
        until(lambda: len(sent) == 5)
        sender.join(0.2)
        assert sender.is_alive()
        assert len(sent) == 5
        assert producer.bytes_in_flight == 5000
        with pytest.raises(TimeoutError, match=r"5000 bytes were not acknowledged within 0\.1 s"):
            producer.flush(0.1)
        paused.resume()
        sender.join(60)
        producer.flush(60)
    assert len(values_in(client, run_id)) == 9


def test_producer_raises_failure_on_next_call(own_broker: Broker, paused: PausedBroker, run_id: str) -> None:
    client = topic_on(own_broker, run_id)
    producer = BoundedProducer(
        ClientProperties({**client.entries, "request.timeout.ms": "2000", "delivery.timeout.ms": "4000"})
    )
    producer.send(run_id, b"first")
    producer.flush(10)
    paused.suspend()
    producer.send(run_id, b"lost")
    deadline = time.monotonic() + 60
    while producer.bytes_in_flight and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(DeliveryFailed, match=r"1 record\(s\) were not delivered: ") as failed:
        producer.send(run_id, b"never taken")
    assert failed.value.__cause__ is not None
    producer.flush(0)  # said once
    paused.resume()
    producer._client = client  # the record after the failure has more time
    producer.send(run_id, b"last")
    producer.close(60)
    values = [record.value for record in values_in(client, run_id)]
    assert values[0] == b"first"
    assert sorted(values[1:]) in ([b"last"], [b"last", b"lost"])  # lost means not known to be there: it may come late


def test_producer_send_times_out(own_broker: Broker, paused: PausedBroker, run_id: str) -> None:
    client = topic_on(own_broker, run_id)
    with BoundedProducer(client, max_bytes_in_flight=10) as producer:
        producer.send(run_id, b"first")
        producer.flush(10)
        producer._max_block_s = 0.2  # not before: it bounds the first connection, too
        paused.suspend()
        producer.send(run_id, b"0123456789")
        with pytest.raises(TimeoutError, match=r"10 bytes were not acknowledged within 0\.2 s"):
            producer.send(run_id, b"9")
        paused.resume()
    assert [record.value for record in values_in(client, run_id)] == [b"first", b"0123456789"]


def test_producer_close_keeps_deadline_and_ends_thread(own_broker: Broker, paused: PausedBroker, run_id: str) -> None:
    before = set(threading.enumerate())
    producer = BoundedProducer(topic_on(own_broker, run_id))
    producer.send(run_id, b"first")
    producer.flush(10)
    paused.suspend()
    producer.send(run_id, b"stuck")
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="5 bytes were not acknowledged"):
        producer.close(timeout_s=0.3)
    assert time.monotonic() - started < 20  # the client would wait for 30 s and more
    assert set(threading.enumerate()) <= before
    producer.close()
    with pytest.raises(ValueError, match="closed"):
        producer.send(run_id, b"late")


def test_producer_close_wakes_waiting_senders(own_broker: Broker, paused: PausedBroker, run_id: str) -> None:
    producer = BoundedProducer(topic_on(own_broker, run_id), max_bytes_in_flight=10)
    producer.send(run_id, b"first")
    producer.flush(10)
    paused.suspend()
    producer.send(run_id, b"0123456789")
    raised: list[Exception] = []

    def wait() -> None:
        try:
            producer.send(run_id, b"0123456789")
        except (ValueError, DeliveryFailed) as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    with pytest.raises(TimeoutError):
        producer.close(timeout_s=0.1)
    waiting.join(60)
    assert [str(error) for error in raised] == ["the producer is closed"]


def test_producer_rejects_record_over_the_bound(broker: Broker, run_id: str) -> None:
    with (
        BoundedProducer(topic_on(broker, run_id), max_bytes_in_flight=100) as producer,
        pytest.raises(ValueError, match="a record of 101 bytes is over the bound of 100"),
    ):
        producer.send(run_id, bytes(90), key=b"12345", headers=[("name", b"ab")])


def test_producer_rejects_unknown_topic(broker: Broker, run_id: str) -> None:
    client = ClientProperties({"bootstrap.servers": broker.bootstrap_servers, "max.block.ms": "300"})
    with BoundedProducer(client) as producer, pytest.raises(DeliveryFailed, match=f"{run_id} cannot be sent"):
        producer.send(run_id, b"value")
    assert producer.bytes_in_flight == 0


def test_producer_error_names_address_without_broker() -> None:
    port = free_port()
    with pytest.raises(DeliveryFailed, match=rf"no broker accepts records: .*127\.0\.0\.1:{port}"):
        BoundedProducer(ClientProperties.at(f"127.0.0.1:{port}"), max_block_s=0.3)
