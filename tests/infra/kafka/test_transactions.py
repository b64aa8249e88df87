"""A transaction's calls end, whatever becomes of the coordinator's answer."""

from __future__ import annotations

import time

import pytest
from kafka.errors import KafkaTimeoutError
from kafka.producer.transaction_manager import TransactionalRequestResult

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from infra.kafka.transactions import TransactionalProducer


@pytest.mark.parametrize("lost", ["begin_commit", "send_offsets_to_transaction"])
def test_transaction_times_out_on_lost_response(broker: Broker, run_id: str, lost: str) -> None:
    client = ClientProperties.at(broker.bootstrap_servers)
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(run_id, 1)])
    producer = TransactionalProducer(transaction_timeout_ms=1000, **client.producer(transactional_id=run_id))
    try:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(run_id, b"whole").get(timeout=10)
        producer.send_offsets_to_transaction({}, run_id)
        producer.commit_transaction()  # without trouble it is as ever
        producer.begin_transaction()
        setattr(producer._transaction_manager, lost, lambda *arguments: TransactionalRequestResult())
        calls = {
            "begin_commit": producer.commit_transaction,
            "send_offsets_to_transaction": lambda: producer.send_offsets_to_transaction({}, run_id),
        }
        began = time.monotonic()
        with pytest.raises(KafkaTimeoutError, match="did not end within"):
            calls[lost]()
        assert 0.9 <= time.monotonic() - began < 30.0
    finally:
        producer.close(timeout=1)
