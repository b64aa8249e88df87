"""The simulated cluster responds as Kafka does: the same random calls on both have the same responses and logs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from kafka import KafkaConsumer, TopicPartition
from random_calls import GROUPS, Applied, Caller
from raw_kafka import RawKafka

from infra.kafka.admin import TopicSpec, admin_client, create_topics, end_offsets
from infra.kafka.broker import Broker, BrokerConfig, start_broker
from infra.simulation.cluster import Place, SimulatedCluster


@pytest.fixture(scope="module")
def private_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with start_broker(BrokerConfig(tmp_path_factory.mktemp("kafka"))) as broker:
        yield broker


def visible(broker: Broker, place: Place, isolation: str) -> list[tuple[int, bytes]]:
    """The offsets and values that a reader sees."""
    options = broker.client().consumer(group_id=None, isolation_level=isolation)
    with KafkaConsumer(**options) as consumer:
        where = TopicPartition(*place)
        consumer.assign([where])
        consumer.seek_to_beginning(where)
        end = consumer.end_offsets([where])[where]
        found: list[tuple[int, bytes]] = []
        while consumer.position(where) < end:
            found += [(each.offset, each.value) for each in consumer.poll(200).get(where, ())]
        return found


def compare(broker: Broker, seed: int, count: int) -> None:
    """Apply `count` calls to a new topic of the broker and to a simulated cluster; compare everything observable."""
    topic = f"model-{seed}"
    places = [Place(topic, 0), Place(topic, 1)]
    with admin_client(broker.client()) as admin:
        create_topics(admin, [TopicSpec(topic, 2)])
        real, simulated = Applied(RawKafka(admin)), Applied(SimulatedCluster({topic: 2}))
        caller, done = Caller(seed, places), list[tuple[object, object]]()
        for call in caller.calls(count):
            expected = real.apply(call)
            found = simulated.apply(call)
            assert found == expected, f"seed {seed}, call {len(done)}: {call}: {found}, Kafka: {expected}; {done[-12:]}"
            done.append((call, expected))
            if call.name == "produce" and isinstance(expected, int):
                caller.accepted(call)
        ends(admin, topic, simulated.cluster, places)
        offsets = real.cluster.committed_offsets(GROUPS[0])
        assert {k: v for k, v in offsets.items() if k.topic == topic} == simulated.cluster.committed_offsets(GROUPS[0])
    for place in places:
        for isolation in ("read_committed", "read_uncommitted"):
            committed = isolation == "read_committed"
            log = simulated.cluster.log(place)
            assert log.fetch(log.begin, committed=committed) == visible(broker, place, isolation)


def ends(admin: object, topic: str, cluster: SimulatedCluster, places: Sequence[Place]) -> None:
    for committed in (True, False):
        found = end_offsets(admin, [topic], committed=committed)  # type: ignore[arg-type]
        for place in places:
            log = cluster.log(place)
            assert found[TopicPartition(*place)] == (log.stable_end if committed else log.end)


@pytest.mark.parametrize("seed", range(3))
def test_simulated_cluster_equals_kafka(private_broker: Broker, seed: int) -> None:
    compare(private_broker, seed, 400)


@pytest.mark.soak
def test_simulated_cluster_equals_kafka_in_100_000_calls(private_broker: Broker) -> None:
    for seed in range(100, 300):
        compare(private_broker, seed, 500)
