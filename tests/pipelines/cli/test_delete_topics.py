"""`laminar runs delete --topics` refuses the topics of roles that work, whatever the clocks of their machines show."""

from __future__ import annotations

import pytest
from kafka import KafkaProducer
from record_samples import SAMPLES

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from pipelines.cli import delete
from pipelines.cli.options import RunClient
from schemas.codec import encode
from schemas.records import ReplicaStatus
from schemas.topics import REPLICAS, RESTORE


def test_delete_refuses_topics_that_grow(broker: Broker, run_id: str) -> None:
    client = ClientProperties.at(broker.bootstrap_servers)
    names = [topic.name(run_id) for topic in (REPLICAS, RESTORE)]
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(name, 1) for name in names])
    watched = delete._Watched(RunClient(run_id, client))
    watched.refuse_written()
    assert watched.topics == names
    with KafkaProducer(bootstrap_servers=broker.bootstrap_servers) as producer:
        value, headers = encode(SAMPLES[ReplicaStatus])  # its time is years ago
        producer.send(REPLICAS.name(run_id), value, headers=list(headers))
    with pytest.raises(RuntimeError, match=f"something wrote to {REPLICAS.name(run_id)} while they were watched"):
        watched.refuse_written()
