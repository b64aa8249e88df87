"""Topics are read as they stand: committed records only, from where it was asked, decoded where they can be."""

from __future__ import annotations

from typing import Any

import pytest
from kafka import KafkaProducer, TopicPartition
from kafka.structs import OffsetAndMetadata
from markers import wait_for_markers
from waiting import until

from infra.kafka import consumers
from infra.kafka.admin import TopicSpec, admin_client, create_topics, delete_records
from infra.kafka.broker import Broker
from infra.kafka.consumers import new_consumer
from infra.kafka.lag import group_lags, list_groups, record_counts
from infra.kafka.offset_span import Edge, parse_span
from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import UnknownTopic, partition_ranges, resolve_span
from infra.kafka.topic_reader import last_records, read_batches, read_topic
from schemas.codec import encode
from schemas.records import Metric
from schemas.topics import METRICS, group_name, run_of, run_prefix

RUN = "reading-topics"


@pytest.fixture(scope="module")
def client(broker: Broker) -> ClientProperties:
    return ClientProperties.at(broker.bootstrap_servers)


@pytest.fixture(scope="module")
def topic(broker: Broker, client: ClientProperties) -> str:
    """Three partitions: in 0 the steps 0-5 in three transactions, one more aborted, and rubbish; nothing in 1 and 2."""
    name = METRICS.name(RUN)
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(name, 3)])
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers, transactional_id=group_name(RUN, "trainer"))
    producer.init_transactions()
    for first in (0, 2, 4):
        producer.begin_transaction()
        for step in (first, first + 1):
            value, headers = encode(Metric("train", step, {"loss": 0.5}, 1))
            producer.send(name, value, key=b"train", headers=list(headers), partition=0)
        producer.send_offsets_to_transaction(
            {TopicPartition(name, 0): OffsetAndMetadata(first + 2, "", -1)}, group_name(RUN, "trainer")
        )
        producer.commit_transaction()
    producer.begin_transaction()
    producer.send(name, b"aborted", partition=0)
    producer.flush()
    producer.abort_transaction()
    producer.begin_transaction()
    producer.send(name, b"rubbish", headers=list(headers), partition=0)
    producer.commit_transaction()
    producer.close()
    wait_for_markers(client, name)
    return name


def steps(records: list) -> list[int | None]:
    return [record.rows[0].step if record.rows else None for record in records]


def test_read_topic_reads_committed_records(client: ClientProperties, topic: str) -> None:
    records = list(read_topic(client, topic))
    assert steps(records) == [0, 1, 2, 3, 4, 5, None]
    assert records[0].schema == "Metric/2"
    assert records[0].key == b"train"
    assert records[-1].error is not None
    assert "not JSON" in records[-1].error
    assert records[-1].size == len(b"rubbish")


@pytest.mark.parametrize(
    ("start", "expected"),
    [("beginning", 7), ("end", 0), ("0", 7), ("3", 5), ("4", 4), ("999", 0), ("-1", 0), ("-2", 1), ("-999", 7)],
)
def test_read_topic_begins_at_start(client: ClientProperties, topic: str, start: str, expected: int) -> None:
    spans = resolve_span(client, topic, parse_span([start], 0))
    first = {number: held.beginning for number, held in spans.items()}
    assert len(list(read_topic(client, topic, start=first))) == expected


@pytest.mark.parametrize(("count", "expected"), [(1, [None]), (3, [4, 5, None]), (100, [0, 1, 2, 3, 4, 5, None])])
def test_last_records_skips_markers(
    client: ClientProperties, topic: str, count: int, expected: list[int | None]
) -> None:
    assert steps(last_records(client, topic, count)) == expected


def test_read_topic_reads_only_given_partitions(client: ClientProperties, topic: str) -> None:
    assert list(read_topic(client, topic, partitions=[1])) == []
    with pytest.raises(UnknownTopic, match="not \\[7\\]"):
        list(read_topic(client, topic, partitions=[0, 7]))
    with pytest.raises(UnknownTopic, match="there is no topic"):
        list(read_topic(client, f"{topic}-not"))


def test_read_topic_follows_new_records(client: ClientProperties, broker: Broker, run_id: str) -> None:
    topic = METRICS.name(run_id)
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(topic, 3)])

    def write(step: int) -> None:
        value, headers = encode(Metric("train", step, {}, 1))
        producer.send(topic, value, headers=list(headers), partition=2).get(timeout=10)

    producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers)
    write(77)
    following = read_topic(client, topic, start=Edge("end", 1), partitions=[2], follow=True)
    assert next(following).rows[0].step == 77
    write(78)
    assert next(following).rows[0].step == 78
    following.close()
    producer.close()


def test_reader_names_deleted_records_it_skips(
    client: ClientProperties, broker: Broker, run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic, places = METRICS.name(run_id), [TopicPartition(METRICS.name(run_id), number) for number in range(2)]

    def gaps() -> list[str]:
        return [each.message for each in caplog.records if each.name == consumers.__name__]

    with admin_client(client) as admin, KafkaProducer(bootstrap_servers=broker.bootstrap_servers) as producer:
        create_topics(admin, [TopicSpec(topic, 2)])
        for place in places * 10:
            producer.send(topic, b"", partition=place.partition)
        producer.flush()
        delete_records(admin, {(topic, 1): 4})
        assert len(list(read_topic(client, topic))) == 16
        assert len(list(read_topic(client, topic, start={0: 5, 1: 0}))) == 11
        resolve_span(client, topic, parse_span(["0:7"], 0), [1])
        assert gaps() == []  # they begin at the beginning
        gap = "are not read: they were deleted, the log begins at"
        assert len(list(read_topic(client, topic, start={0: 5, 1: 3}))) == 11
        resolve_span(client, topic, parse_span(["2:7"], 0), [1])
        assert gaps() == [
            f"offsets 3 to 3 of {topic}, partition 1, {gap} 4",
            f"offsets 2 to 3 of {topic}, partition 1, {gap} 4",
        ]
        caplog.clear()
        following = new_consumer(client)
        following.assign(places)
        for place in places:
            following.seek(place, 8)
        delete_records(admin, {(topic, 0): 9})
        first: dict[int, int] = {}

        def has_both() -> bool:
            for place, batches in following.poll(timeout_ms=100).items():
                first.setdefault(place.partition, batches[0].value.offsets[0])
            return len(first) == 2

        until(has_both)
        following.close()
        assert first == {0: 9, 1: 8}
        assert gaps() == [f"offsets 8 to 8 of {topic}, partition 0, {gap} 9"]


def test_read_topic_creates_no_group(client: ClientProperties, topic: str) -> None:
    with admin_client(client) as admin:
        before = list_groups(admin, "")
        list(read_topic(client, topic))
        assert list_groups(admin, "") == before
        assert group_name(RUN, "trainer") in before


def test_group_lags_count_uncommitted_records(client: ClientProperties, topic: str) -> None:
    with admin_client(client) as admin:
        (lag,) = group_lags(admin, list_groups(admin, run_prefix(RUN)))
        ranges = partition_ranges(client, topic)
        assert (lag.group, lag.topic, lag.partition) == (group_name(RUN, "trainer"), topic, 0)
        assert lag.committed == 6
        assert lag.end == ranges[0].end
        assert lag.lag == ranges[0].end - 6 > 0
        assert record_counts(admin, [topic])[topic] == sum(held.end - held.beginning for held in ranges.values())


def test_run_of_topic_name() -> None:
    assert run_of(METRICS.name("a-1")) == "a-1"
    assert run_of("laminar.a.nonsense") is None
    assert run_of("other.a.metrics") is None
    assert METRICS.name("a") == run_prefix("a") + "metrics"


def test_abandoned_reader_may_end_on_a_thread_of_its_client(
    client: ClientProperties, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector runs on any thread, and a thread of kafka-python must not wait for its own work."""
    opened: list[Any] = []
    monkeypatch.setattr(consumers, "new_consumer", lambda client: opened.append(new_consumer(client)) or opened[0])
    reader = read_batches(client, topic)
    next(reader)
    ended: list[BaseException | None] = []

    async def end() -> None:
        try:
            reader.close()
        except BaseException as error:  # noqa: BLE001 - the test fails by it
            ended.append(error)
        ended.append(None)

    opened[0]._coordinator._net.call_soon_threadsafe(end)
    until(lambda: ended and opened[0]._closed)
    assert ended == [None]
