"""`laminar topics transactions`: open transactions are listed with their producers and aborted with --execute."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from kafka import KafkaProducer
from kafka.errors import KafkaError

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from schemas.topics import SETTLED, group_name

RUN = "open-transactions"
WRITER = group_name(RUN, "experience")


@pytest.fixture
def laminar(broker: Broker, command: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str, str]]:
    return lambda *words: command(*words, "--run", RUN, "-b", broker.bootstrap_servers)


@pytest.fixture
def writer(broker: Broker) -> Iterator[KafkaProducer]:
    """A producer with an open transaction in the topic `settled`."""
    client = ClientProperties.at(broker.bootstrap_servers)
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(SETTLED.name(RUN), 1)])
    producer = KafkaProducer(**client.producer(transactional_id=WRITER))
    producer.init_transactions()
    producer.begin_transaction()
    producer.send(SETTLED.name(RUN), b"undecided").get(10)
    yield producer
    producer.close(timeout=1)


def test_transactions_abort_ends_listed_transaction(
    laminar: Callable[..., tuple[int, str, str]], writer: KafkaProducer
) -> None:
    (row,) = json.loads(laminar("topics", "transactions", "list", "--json")[1])
    assert (row["topic"], row["transactional_id"], row["state"]) == (SETTLED.name(RUN), WRITER, "Ongoing")
    words = ("topics", "transactions", "abort", str(row["producer_id"]), "--json")
    dry_run = "would be: aborted, producer fenced (dry run; use --execute)"
    assert json.loads(laminar(*words)[1])[0]["action"] == dry_run
    assert json.loads(laminar(*words, "--execute")[1])[0]["action"] == "aborted, producer fenced"
    code, _, err = laminar(*words)
    assert (code, "has no open transaction in the topics of run open-transactions" in err) == (1, True)
    with pytest.raises(KafkaError):
        writer.commit_transaction()
