"""A transaction that times out while its broker is down is aborted soon after the broker restarts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from kafka import KafkaConsumer, KafkaProducer, TopicPartition

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import BrokerConfig, start_broker
from infra.kafka.properties import ClientProperties

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]
TOPIC = TopicPartition("across", 0)
KILLS = 10


def committed_end(servers: str) -> int:
    consumer = KafkaConsumer(bootstrap_servers=servers, group_id=None, isolation_level="read_committed")
    try:
        return int(consumer.end_offsets([TOPIC])[TOPIC])
    finally:
        consumer.close()


def test_broker_aborts_expired_transactions_after_a_kill(tmp_path: Path) -> None:
    open_before = []
    with start_broker(BrokerConfig(tmp_path)) as broker:
        servers = broker.bootstrap_servers
        with admin_client(ClientProperties.at(servers)) as admin:
            create_topics(admin, [TopicSpec(TOPIC.topic, 1)])
        for kill in range(KILLS):
            producer = KafkaProducer(
                bootstrap_servers=servers, transactional_id=f"t{kill}", transaction_timeout_ms=2000
            )
            producer.init_transactions()
            producer.begin_transaction()
            written = producer.send(*TOPIC[:1], b"x", partition=TOPIC.partition).get(10).offset
            broker.kill()
            producer.close(timeout=0)
            time.sleep(3)
            broker.start()
            deadline = time.monotonic() + 30
            while (open_still := committed_end(servers) <= written) and time.monotonic() < deadline:
                time.sleep(0.2)
            open_before.append(open_still)
            assert not open_still, f"the transaction is still open 30 s after kill {kill}"
    assert len(open_before) == KILLS
