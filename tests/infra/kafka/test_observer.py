"""Observing a run: on the real broker, and the arithmetic of lag as a table."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.structs import OffsetAndMetadata
from markers import wait_for_markers
from waiting import until

from infra.kafka import consumers
from infra.kafka import observer as observe
from infra.kafka.admin import TopicSpec, admin_client, create_topics, delete_records
from infra.kafka.broker import Broker, BrokerConfig, start_broker
from infra.kafka.observer import LAG_RETRY_S, Observer, inbox_lags, topic_lags
from infra.kafka.properties import ClientProperties
from infra.kafka.unreadable_record import UnreadableRecord
from schemas.codec import encode
from schemas.records import Metric, PolicyVersion, RelayStatus, WeightVersion
from schemas.topics import EXPERIENCES, INBOX, METRICS, PROMPTS, RELAY, REPLICAS, TRAJECTORIES, Topic, group_name

ANSWER_S = 25.0
"""Some ANSWER_MS of the observer, not the 30 s and more of the client's defaults."""


@pytest.fixture(scope="module")
def client(broker: Broker) -> Iterator[KafkaAdminClient]:
    with admin_client(ClientProperties.at(broker.bootstrap_servers)) as connected:
        yield connected


def make_topics(client: KafkaAdminClient, run: str) -> None:
    create_topics(client, [TopicSpec(topic.name(run), 1, 1) for topic in (METRICS, RELAY, REPLICAS, PROMPTS, INBOX)])


def producer(broker: Broker, **arguments: Any) -> KafkaProducer:
    return KafkaProducer(bootstrap_servers=broker.bootstrap_servers, **arguments)


def send(to: KafkaProducer, run: str, topic: Topic, record: Any) -> None:
    value, headers = encode(record)
    to.send(topic.name(run), value=value, headers=list(headers))


def commit(broker: Broker, group: str, where: TopicPartition, offset: int) -> None:
    consumer = KafkaConsumer(
        bootstrap_servers=broker.bootstrap_servers, group_id=group, enable_auto_commit=False, metrics_enabled=False
    )
    consumer.assign([where])
    consumer.commit({where: OffsetAndMetadata(offset, "", -1)})
    consumer.close()


def poll_until(observer: Observer, enough: Callable[[list[Any]], bool], seconds: float = 60.0) -> list[Any]:
    found: list[Any] = []
    deadline = time.monotonic() + seconds
    while not enough(found) and time.monotonic() < deadline:
        found += observer.poll(0.05)
    return found


def gaps(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of records that are not read."""
    return [each.message for each in caplog.records if each.name == consumers.__name__]


def metric(step: int) -> Metric:
    return Metric("trainer", step, {"reward/mean": step / 2}, 1_000 + step)


VERSION = WeightVersion(PolicyVersion(1, 0), None, 0, "f", 8, "00" * 32, (), (), (0,), 0, False, 5)


def beat(at: int) -> RelayStatus:
    return RelayStatus(0, ("1.1",), 5, "host", 7, at)


def test_observer_returns_metrics_and_heartbeats_in_order(
    broker: Broker, client: KafkaAdminClient, run_id: str
) -> None:
    make_topics(client, run_id)
    with producer(broker) as plain:
        send(plain, run_id, METRICS, metric(1))
        send(plain, run_id, RELAY, VERSION)
        send(plain, run_id, REPLICAS, beat(1))
        plain.flush()
        with Observer(ClientProperties.at(broker.bootstrap_servers), run_id) as observer:
            send(plain, run_id, METRICS, metric(2))
            send(plain, run_id, REPLICAS, beat(2))
            plain.flush()
            found = poll_until(observer, lambda records: len(records) >= 4)
            assert [each for each in found if isinstance(each, Metric)] == [metric(1), metric(2)]
            assert [each for each in found if isinstance(each, RelayStatus)] == [beat(2)]
            assert [each for each in found if isinstance(each, WeightVersion)] == [VERSION]
            started = time.monotonic()
            assert observer.poll() == []
            assert time.monotonic() - started < ANSWER_S
            assert observer.caught_up()
            send(plain, run_id, REPLICAS, beat(3))
            plain.flush()
            assert observer.caught_up()  # with what there was at first
            observer.expect_all()
            assert not observer.caught_up()
            assert poll_until(observer, lambda records: observer.caught_up()) == [beat(3)]


def test_observer_begins_near_end_or_at_positions(
    broker: Broker,
    client: KafkaAdminClient,
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_topics(client, run_id)
    with producer(broker) as plain:
        for step in range(10):
            send(plain, run_id, METRICS, metric(step))
        send(plain, run_id, RELAY, VERSION)
        plain.flush()
        monkeypatch.setitem(observe.NEWEST, METRICS.short_name, 3)
        with Observer(ClientProperties.at(broker.bootstrap_servers), run_id) as observer:
            found = poll_until(observer, lambda records: len(records) >= 4)
            assert [each.step for each in found if isinstance(each, Metric)] == [7, 8, 9]
            positions = observer.positions()
        assert positions == {"metrics": 10.0, "relay": 1.0}
        send(plain, run_id, METRICS, metric(10))
        plain.flush()
        with Observer(ClientProperties.at(broker.bootstrap_servers), run_id, positions=positions) as observer:
            assert poll_until(observer, lambda records: bool(records)) == [metric(10)]
        delete_records(client, {(METRICS.name(run_id), 0): 5})
        at_end = {"metrics": math.inf, "relay": math.inf}
        for given in (None, positions, at_end):
            with Observer(ClientProperties.at(broker.bootstrap_servers), run_id, positions=given):
                assert gaps(caplog) == []
        cut_and_made_again = {"metrics": 2.0, "relay": 10.0**6}
        with Observer(ClientProperties.at(broker.bootstrap_servers), run_id, positions=cut_and_made_again) as observer:
            assert observer.positions() == {"metrics": 5.0, "relay": 1.0}
    cut, made_again = gaps(caplog)
    assert cut.startswith(f"offsets 2 to 4 of {METRICS.name(run_id)}, partition 0, are not read: they were deleted")
    assert made_again.startswith(f"{RELAY.name(run_id)}, partition 0, ends before offset 1000000, which")


def test_observer_hides_uncommitted_and_reports_unreadable(
    broker: Broker, client: KafkaAdminClient, run_id: str
) -> None:
    make_topics(client, run_id)
    with producer(broker, transactional_id=run_id) as writer:
        writer.init_transactions()
        writer.begin_transaction()
        send(writer, run_id, METRICS, metric(1))
        writer.flush()
        writer.abort_transaction()
        writer.begin_transaction()
        writer.send(METRICS.name(run_id), value=b"garbage")
        send(writer, run_id, METRICS, VERSION)
        send(writer, run_id, METRICS, metric(2))
        writer.commit_transaction()
    wait_for_markers(ClientProperties.at(broker.bootstrap_servers), METRICS.name(run_id))
    with producer(broker) as plain:
        send(plain, run_id, METRICS, metric(3))

    def refuse(record: Any, transactional: bool) -> str | None:
        return None if transactional else f"step {record.step} of another program"

    with Observer(ClientProperties.at(broker.bootstrap_servers), run_id, refuse=refuse) as observer:
        garbage, stranger, seen, foreign = poll_until(observer, lambda records: len(records) >= 4)
    assert seen == metric(2)
    assert garbage == UnreadableRecord("metrics", 0, 2, "no laminar-schema header")  # offset 1: marker
    assert stranger == UnreadableRecord("metrics", 0, 3, "a WeightVersion does not belong on metrics")
    assert foreign == UnreadableRecord("metrics", 0, 6, "step 3 of another program")


def test_observer_requests_lag_at_most_every_two_seconds(
    broker: Broker, client: KafkaAdminClient, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "ANSWER_MS", 60_000)
    make_topics(client, run_id)
    prompts = TopicPartition(PROMPTS.name(run_id), 0)
    with producer(broker) as plain:
        for _ in range(5):
            plain.send(prompts.topic, value=b"x")
        plain.flush()
    now = 100.0
    with Observer(ClientProperties.at(broker.bootstrap_servers), run_id, clock=lambda: now) as observer:
        assert observer.lag() == {}
        commit(broker, group_name(run_id, "placement"), prompts, 2)
        assert observer.lag() == {}
        now += 2.0
        assert observer.lag() == {"prompts": 3}


def test_observer_keeps_last_values_without_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    with start_broker(BrokerConfig(tmp_path)) as broker:
        properties = ClientProperties.at(broker.bootstrap_servers)
        with admin_client(properties) as client:
            make_topics(client, "gone")
            prompts = TopicPartition(PROMPTS.name("gone"), 0)
            commit(broker, group_name("gone", "placement"), prompts, 0)
        with producer(broker) as plain:
            plain.send(prompts.topic, value=b"x").get(60)
        observer = Observer(properties, "gone", clock=lambda: now)

        def lag_later() -> dict[str, int]:
            """After the pause that follows a request without a response in time."""
            nonlocal now
            now += LAG_RETRY_S
            return observer.lag()

        until(lambda: lag_later() == {"prompts": 1})
        positions = observer.positions()
    with contextlib.closing(observer):
        started = time.monotonic()
        now += 5
        assert observer.poll() == []
        assert observer.lag() == {"prompts": 1}
        assert observer.positions() == positions
        observer._consumer.seek_to_end(*observer._read.values())  # the client would request these positions
        assert observer.positions() == positions
        assert time.monotonic() - started < ANSWER_S
        now += LAG_RETRY_S - 1  # it leaves Kafka alone for a while
        with monkeypatch.context() as patched:
            patched.setattr(Observer, "_request_lag", None)
            assert observer.lag() == {"prompts": 1}


def at(topic: Topic, partition: int = 0) -> TopicPartition:
    return TopicPartition(topic.name("r"), partition)


@pytest.mark.parametrize(
    ("committed", "expected"),
    [
        ({}, {}),
        ({"placement.0": {at(PROMPTS): 4}}, {"prompts": 6}),
        # over shards it adds up, over pipelines the slowest counts
        ({"score.0": {at(TRAJECTORIES): 7}, "score.1": {at(TRAJECTORIES, 1): 8}}, {"trajectories": 5}),
        # shard 0 had partition 1 before
        (
            {"score.0": {at(TRAJECTORIES): 7, at(TRAJECTORIES, 1): 0}, "score.1": {at(TRAJECTORIES, 1): 8}},
            {"trajectories": 5},
        ),
        ({"experience.0": {at(EXPERIENCES): 7}, "evaluation.0": {at(EXPERIENCES): 9}}, {"experiences": 3}),
        # placement commits its oldest outstanding trajectory
        ({"score.0": {at(TRAJECTORIES): 7}, "placement.0": {at(TRAJECTORIES): 0}}, {"trajectories": 3}),
        # beyond the end, of a topic that is gone, and an anchor on one's own output
        ({"placement.0": {at(PROMPTS): 11}}, {"prompts": 0}),
        ({"placement.0": {at(PROMPTS, 5): 1}}, {}),
        ({"prompts.0": {at(PROMPTS): 0}}, {}),
        ({"score.0": {TopicPartition("elsewhere", 0): 0}}, {}),
        # in the catalogue's order
        ({"score.0": {at(TRAJECTORIES): 9}, "placement.0": {at(PROMPTS): 9}}, {"prompts": 1, "trajectories": 1}),
    ],
)
def test_topic_lags_by_topic(committed: dict[str, dict[TopicPartition, int]], expected: dict[str, int]) -> None:
    ends = {
        at(PROMPTS): 10,
        at(EXPERIENCES): 10,
        at(TRAJECTORIES): 10,
        at(TRAJECTORIES, 1): 10,
        TopicPartition("elsewhere", 0): 10,
    }
    groups = {group_name("r", name.partition(".")[0], int(name[-1])): of for name, of in committed.items()}
    found = topic_lags("r", groups, ends)
    assert found == expected
    assert list(found) == list(expected)


def test_inbox_lags_by_replica() -> None:
    """The partition of a rollout that was removed for good keeps what nobody reads."""
    committed = {
        group_name("r", "rollout"): {at(INBOX): 10},
        group_name("r", "rollout", 1): {at(INBOX, 1): 4},
        group_name("r", "gateway"): {at(INBOX): 9, at(INBOX, 1): 10},
        group_name("r", "score"): {at(TRAJECTORIES): 0},
    }
    ends = {at(INBOX): 10, at(INBOX, 1): 10, at(TRAJECTORIES): 10}
    assert inbox_lags("r", committed, ends) == {0: 1, 1: 6}
