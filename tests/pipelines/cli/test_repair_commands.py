"""`laminar topics replay` and `reset`: their output, their effect with --execute, and no effect in a dry run."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from kafka import KafkaConsumer, KafkaProducer, OffsetAndMetadata, TopicPartition
from record_samples import SAMPLES
from waiting import until

from infra.kafka.admin import TopicSpec, admin_client, committed_offsets, create_topics
from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from infra.kafka.run_release import last_notes, release_of
from infra.kafka.session import Fenced, Partition, Session
from infra.kafka.session_config import Input, SessionConfig
from infra.kafka.topic_reader import read_topic
from infra.kafka.transactions import TransactionalProducer
from pipelines.distribution import LAMINAR
from schemas.codec import encode
from schemas.records import Settled
from schemas.release import NEWEST
from schemas.topics import RESTORE, SETTLED, group_name

RUN = "repair-commands"
Laminar = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def client(broker: Broker) -> ClientProperties:
    """Ten settled trajectories on two partitions, and a topic of two partitions for another run."""
    client = ClientProperties.at(broker.bootstrap_servers)
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(SETTLED.name(run), 2) for run in (RUN, f"{RUN}-again")])
        create_topics(admin, [TopicSpec(RESTORE.name(RUN), 1)])
    sample = SAMPLES[Settled]
    assert isinstance(sample, Settled)
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers)
    for number in range(10):
        value, headers = encode(replace(sample, trajectory_id=f"p{number}.0", tokens=number))
        producer.send(SETTLED.name(RUN), value, b"k", list(headers), number % 2)
    producer.flush()
    producer.close()
    return client


@pytest.fixture
def laminar(client: ClientProperties, command: Laminar) -> Laminar:
    return lambda *words: command(*words, "--run", RUN, "-b", client.bootstrap_servers)


def records_of(client: ClientProperties, run: str) -> list[tuple[int, bytes | None, str]]:
    return [(each.partition, each.key, each.rows[0].trajectory_id) for each in read_topic(client, SETTLED.name(run))]


def test_replay_copies_matching_records_with_execute(laminar: Laminar, client: ClientProperties) -> None:
    words = ("topics", "replay", "settled", "-w", "tokens >= 7", "--to", SETTLED.name(f"{RUN}-again"), "--json")
    rows = json.loads(laminar(*words)[1])
    assert sorted(row["from"] for row in rows) == ["0:4", "1:3", "1:4"]
    assert {row["action"] for row in rows} == {"would be sent (dry run; use --execute)"}
    assert records_of(client, f"{RUN}-again") == []
    assert len(json.loads(laminar(*words, "--execute")[1])) == 3
    assert sorted(records_of(client, f"{RUN}-again")) == [(0, b"k", "p8.0"), (1, b"k", "p7.0"), (1, b"k", "p9.0")]


def test_replay_rejects_missing_selection(laminar: Laminar) -> None:
    code, _, err = laminar("topics", "replay", "settled")
    assert (code, "select the records" in err) == (2, True)


@pytest.fixture
def session(client: ClientProperties) -> Iterator[SessionConfig]:
    """A pipeline that has committed offset 4 of partition 0 and 3 of partition 1, with a commit note."""
    inputs, restore = (Input(SETTLED.name(RUN), (0, 1)),), Partition(RESTORE.name(RUN), 0)
    config = SessionConfig(client, group_name(RUN, "placement"), inputs, restore)
    first = Session(config)
    offsets = {Partition(SETTLED.name(RUN), 0): 4, Partition(SETTLED.name(RUN), 1): 3}
    first.commit([], offsets, {}, {"mark": 7})
    yield config
    first.close()


def test_reset_moves_offsets_back_and_keeps_commit_note(laminar: Laminar, session: SessionConfig) -> None:
    running = Session(session)
    with admin_client(session.client) as admin:  # its offsets are visible only with the transaction's marker
        until(lambda: [each.offset for each in committed_offsets(admin, session.group).values()] == [4, 3])
    words = ("topics", "reset", "placement", "settled", "--to", "1", "-p", "0", "--json")
    (row,) = json.loads(laminar(*words)[1])
    assert (row["current_offset"], row["new_offset"]) == (4, 1)
    assert row["action"] == "rereads 3 offsets (dry run; use --execute)"
    assert json.loads(laminar("topics", "lag", "--json")[1])[0]["current_offset"] == 4
    (row,) = json.loads(laminar(*words, "--execute")[1])
    assert row["action"] == "rereads 3 offsets"
    with pytest.raises(Fenced):
        running.commit([], {Partition(SETTLED.name(RUN), 0): 5}, {}, {})
    running.close()
    assert release_of(last_notes(session.client, RUN)[session.group]) == NEWEST
    after = Session(session)
    assert after.positions() == {Partition(SETTLED.name(RUN), 0): 1, Partition(SETTLED.name(RUN), 1): 3}
    assert (after.note.state, after.start) == ({"mark": 7}, running.start + 1)
    after.close()


def test_reset_runs_as_a_process(client: ClientProperties, session: SessionConfig) -> None:
    """The other commands of `topics` start without numpy."""
    words = ("topics", "reset", "placement", "settled", "--to", "1", "-p", "0", "--execute", "--json", "--run", RUN)
    done = subprocess.run([*LAMINAR, *words, "-b", client.bootstrap_servers], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    (row,) = json.loads(done.stdout)
    assert (row["new_offset"], "dry run" in row["action"]) == (1, False)


def test_reset_reports_skipped_offsets(laminar: Laminar, session: SessionConfig) -> None:
    rows = json.loads(laminar("topics", "reset", "placement", "settled", "--to", "end", "--json")[1])
    assert ["SKIPS" in row["action"] for row in rows] == [True, True]


def test_reset_refuses_a_group_whose_note_is_gone(client: ClientProperties, command: Laminar, run_id: str) -> None:
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(SETTLED.name(run_id), 1), TopicSpec(RESTORE.name(run_id), 1)])
    group = group_name(run_id, "evaluation")
    consumer = KafkaConsumer(bootstrap_servers=client.bootstrap_servers, group_id=group, enable_auto_commit=False)
    consumer.commit({TopicPartition(SETTLED.name(run_id), 0): OffsetAndMetadata(2, "", -1)})
    consumer.close()
    role = TransactionalProducer(**client.producer(transactional_id=group, transaction_timeout_ms=10_000))
    role.init_transactions()
    words = ("topics", "reset", "evaluation", "settled", "--to", "beginning", "--execute")
    code, _, err = command(*words, "--run", run_id, "-b", client.bootstrap_servers)
    assert (code, f"{group} has no note in" in err) == (1, True)
    role.begin([TopicPartition(SETTLED.name(run_id), 0)])
    role.commit_transaction()  # it is not fenced
    role.close()


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (("trainer", "batches", "--to", "0"), 2, "the offsets in its checkpoint"),
        (("score", "trajectories", "--to", "3:4"), 2, "is not a single offset"),
        (("score", "settled", "--to", "0"), 1, "has no committed offsets"),
    ],
)
def test_reset_rejects_invalid_targets(laminar: Laminar, words: tuple[str, ...], code: int, reason: str) -> None:
    found, _, err = laminar("topics", "reset", *words)
    assert (found, reason in " ".join(err.replace("│", " ").split())) == (code, True)
