"""`laminar topics transactions`: open transactions are listed with their producers and aborted with --execute."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import pytest
from kafka import KafkaProducer
from kafka.errors import KafkaError

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.open_transactions import describe_blocking_transactions
from infra.kafka.properties import ClientProperties
from infra.kafka.session_config import Partition
from pipelines.cli.main import main
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


def test_command_that_a_blocked_reader_names_ends_it(
    broker: Broker, writer: KafkaProducer, capsys: pytest.CaptureFixture[str]
) -> None:
    client = ClientProperties.at(broker.bootstrap_servers)
    (line,) = describe_blocking_transactions(client, [Partition(SETTLED.name(RUN), 0)])
    assert f"a transaction of {WRITER} (producer " in line
    (command,) = re.findall("`laminar (.+)`", line)
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    assert (ended.value.code or 0, "aborted, producer fenced" in capsys.readouterr().out) == (0, True)
    assert describe_blocking_transactions(client, [Partition(SETTLED.name(RUN), 0)]) == []


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
