"""Manifests of published versions on a real broker."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kafka import KafkaConsumer, TopicPartition

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.producer import BoundedProducer
from infra.kafka.properties import ClientProperties
from infra.store.announce import ManifestLog
from infra.store.publisher import Publisher, PublishFailed
from infra.store.weight_store import WeightStore
from schemas.codec import decode
from schemas.records import PolicyVersion, TensorSpec
from schemas.topics import RELAY

SPECS = [TensorSpec("w", "F32", (4,))]


def publish(publisher: Publisher, number: int) -> None:
    tensors = {"w": np.full(4, number, np.float32)}
    version = PolicyVersion(1, number)
    publisher.publish(tensors, version, step=number, batches=(number,), batch_offsets=(0,), trajectories_trained=0)
    publisher.flush(30)


def test_manifest_log_has_the_manifests_when_flush_returns(broker: Broker, run_id: str, root: Path) -> None:
    client = ClientProperties.at(broker.bootstrap_servers)
    topic = RELAY.name(run_id)
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(topic, 1, config={"cleanup.policy": RELAY.cleanup})])
    with WeightStore(root) as store, BoundedProducer(client) as producer:
        publisher = Publisher(store, ManifestLog(producer, run_id), SPECS)
        publish(publisher, 1)
        publish(publisher, 2)
        assert producer.bytes_in_flight == 0
        publisher.close(30)
        partition = TopicPartition(topic, 0)
        consumer = KafkaConsumer(**client.consumer(enable_auto_commit=False))
        consumer.assign([partition])
        consumer.seek_to_beginning(partition)
        records = []
        while consumer.position(partition) < consumer.end_offsets([partition])[partition]:
            records += [record for polled in consumer.poll(1000).values() for record in polled]
        consumer.close()
        assert [record.key for record in records] == [b"1.1", b"1.2"]
        for record in records:
            (manifest,) = decode(record.value, record.headers)
            seal = store.seal(manifest.version)
            assert (manifest.bytes, manifest.blake3) == (seal.bytes, seal.blake3)


def test_publish_fails_without_the_topic(broker: Broker, run_id: str, root: Path) -> None:
    client = ClientProperties({"bootstrap.servers": broker.bootstrap_servers, "max.block.ms": "300"})
    with WeightStore(root) as store, BoundedProducer(client) as producer:
        publisher = Publisher(store, ManifestLog(producer, run_id), SPECS)
        with pytest.raises(PublishFailed, match=f"{run_id}.relay cannot be sent"):
            publish(publisher, 1)
        assert publisher.published is None
        publisher.close(30)
