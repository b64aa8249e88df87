"""The simulated cluster responds as Kafka does: the same random calls on both have the same responses and logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition
from random_calls import GROUPS, Applied, Call, Caller
from raw_kafka import RawKafka

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker, BrokerConfig, start_broker
from infra.simulation.cluster import Place, SimulatedCluster


@pytest.fixture(scope="module")
def private_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with start_broker(BrokerConfig(tmp_path_factory.mktemp("kafka"))) as broker:
        yield broker


Seen = Mapping[str, tuple[int, Sequence[tuple[int, Any]]]]
"""By isolation level: the end, and the offsets and values before it."""
LEVELS = ("read_committed", "read_uncommitted")


class ReadableCluster(SimulatedCluster):
    """A simulated cluster that shows what its readers see."""

    def read(self, place: Place) -> Seen:
        log = self.log(place)
        ends = {"read_committed": log.stable_end, "read_uncommitted": log.end}
        return {level: (ends[level], log.fetch(log.begin, committed=level == "read_committed")) for level in LEVELS}


class ReadableKafka(RawKafka):
    """A real broker that shows what its readers see."""

    def __init__(self, admin: KafkaAdminClient, consumers: Mapping[str, KafkaConsumer]) -> None:
        super().__init__(admin)
        self._consumers = consumers

    def read(self, place: Place) -> Seen:
        return {level: visible(consumer, TopicPartition(*place)) for level, consumer in self._consumers.items()}


def visible(consumer: KafkaConsumer, where: TopicPartition) -> tuple[int, list[tuple[int, bytes]]]:
    """The end of a partition for a reader, and the offsets and values that it sees."""
    consumer.assign([where])
    consumer.seek_to_beginning(where)
    end = consumer.end_offsets([where])[where]
    found: list[tuple[int, bytes]] = []
    while consumer.position(where) < end:
        found += [(each.offset, each.value) for each in consumer.poll(200).get(where, ())]
    return end, found


def compare(broker: Broker, seed: int, count: int) -> None:
    """Apply `count` calls to a new topic of the broker and to a simulated cluster; compare everything observable."""
    topic = f"model-{seed}"
    places = [Place(topic, 0), Place(topic, 1)]
    with ExitStack() as stack:
        admin = stack.enter_context(admin_client(broker.client()))
        options = {level: broker.client().consumer(group_id=None, isolation_level=level) for level in LEVELS}
        consumers = {level: stack.enter_context(KafkaConsumer(**options[level])) for level in LEVELS}
        create_topics(admin, [TopicSpec(topic, 2)])
        real, simulated = Applied(ReadableKafka(admin, consumers)), Applied(ReadableCluster({topic: 2}))
        caller, done = Caller(seed, places), list[tuple[object, object]]()
        for call in chain(caller.calls(count), (Call("read", place=place) for place in places)):
            expected = real.apply(call)
            found = simulated.apply(call)
            assert found == expected, f"seed {seed}, call {len(done)}: {call}: {found}, Kafka: {expected}; {done[-12:]}"
            done.append((call, expected))
            if call.name == "produce" and isinstance(expected, int):
                caller.accepted(call)
        offsets = real.cluster.committed_offsets(GROUPS[0])
        assert {k: v for k, v in offsets.items() if k.topic == topic} == simulated.cluster.committed_offsets(GROUPS[0])


@pytest.mark.parametrize("seed", range(3))
def test_simulated_cluster_equals_kafka(private_broker: Broker, seed: int) -> None:
    compare(private_broker, seed, 400)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_simulated_cluster_equals_kafka_in_100_000_calls(private_broker: Broker) -> None:
    for seed in range(100, 300):
        compare(private_broker, seed, 500)
