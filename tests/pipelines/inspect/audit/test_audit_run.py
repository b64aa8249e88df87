"""Audits on a real broker, of a correct run and of one with planted faults."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from audit_records import assignment, experience, manifest, micro_batch, prompt, settled, trajectory
from kafka import KafkaConsumer, KafkaProducer, OffsetAndMetadata, TopicPartition
from markers import wait_for_markers
from role_writer import write_as_role

from infra.kafka import admin as kafka_admin
from infra.kafka.admin import TopicSpec, admin_client, create_topics, stable_ends
from infra.kafka.broker import Broker
from infra.kafka.note import Note
from infra.kafka.properties import ClientProperties
from infra.processes import spawn
from pipelines.cli.main import main
from pipelines.inspect.audit import background_process as background_process
from pipelines.inspect.audit.audit_run import audit
from pipelines.inspect.audit.result import ReachedStage
from schemas.codec import encode
from schemas.records import CommitNote
from schemas.topics import (
    BATCHES,
    EXPERIENCES,
    INBOX,
    PROMPTS,
    RELAY,
    RESTORE,
    SETTLED,
    TRAJECTORIES,
    Topic,
    group_name,
)

TOPICS = (PROMPTS, INBOX, TRAJECTORIES, EXPERIENCES, SETTLED, BATCHES, RELAY)
NAMES = [f"p{number}.{member}" for number in range(4) for member in range(2)]


class Run:
    """A run's topics, two partitions each, written by the test; a group is in one partition."""

    def __init__(self, broker: Broker, run: str) -> None:
        self.run = run
        self.servers = broker.bootstrap_servers
        self.client = ClientProperties.at(self.servers)
        with admin_client(self.client) as admin:
            create_topics(admin, [TopicSpec(topic.name(run), 2) for topic in TOPICS])
        self.producer = KafkaProducer(bootstrap_servers=self.servers)

    def write(self, topic: Topic, *rows: object, partition: int = 0) -> None:
        """Write each row as a separate record."""
        for row in rows:
            value, headers = encode(row)
            self.producer.send(topic.name(self.run), value, headers=list(headers), partition=partition)
        self.producer.flush()

    def commit_offset(self, pipeline: str, topic: Topic, offset: int, partition: int = 0) -> None:
        """Commit `offset` as the pipeline's restore offset."""
        consumer = KafkaConsumer(
            bootstrap_servers=self.servers, group_id=group_name(self.run, pipeline), enable_auto_commit=False
        )
        consumer.commit({TopicPartition(topic.name(self.run), partition): OffsetAndMetadata(offset, "", -1)})
        consumer.close()

    def write_active_run(self) -> None:
        """Eight trajectories: six trained in two batches, one dropped, one not scored yet."""
        self.write(INBOX, *map(assignment, NAMES))
        self.write(TRAJECTORIES, *map(trajectory, NAMES))
        self.write(EXPERIENCES, *map(experience, NAMES[:7]))
        self.commit_offset("score", TRAJECTORIES, 7)
        for batch, names in ((0, NAMES[0:3]), (1, NAMES[3:6])):
            self.write(SETTLED, *(settled(name, batch=batch) for name in names))
            self.write(BATCHES, micro_batch(batch, *names))
        self.write(SETTLED, settled(NAMES[6], "dropped", "over-age"))
        self.commit_offset("experience", EXPERIENCES, 7)
        self.write(RELAY, manifest("1.0", None), manifest("1.1", "1.0", 0), manifest("1.2", "1.1", 1))


def lose_in_placement(run: Run) -> None:
    run.write(PROMPTS, prompt("train", 0, 2), prompt("train", 11, 1), prompt("train", 12, 1))
    run.commit_offset("placement", PROMPTS, 2)


def lose_at_score(run: Run) -> None:
    run.commit_offset("score", TRAJECTORIES, 8)


def lose_in_buffer(run: Run) -> None:
    run.write(INBOX, assignment("p8.0"))
    run.write(TRAJECTORIES, trajectory("p8.0"), partition=1)
    run.write(EXPERIENCES, experience("p8.0"), partition=1)
    run.commit_offset("experience", EXPERIENCES, 1, partition=1)


def lose_in_evaluation(run: Run) -> None:
    run.write(EXPERIENCES, experience("e9.0"), partition=1)
    run.commit_offset("evaluation", EXPERIENCES, 2, partition=1)


def lose_before_batch(run: Run) -> None:
    run.write(SETTLED, settled("p9.0", batch=1))


def lose_at_trainer(run: Run) -> None:
    run.write(SETTLED, settled("p10.0", batch=2))
    run.write(BATCHES, micro_batch(2, "p10.0"))
    run.write(RELAY, manifest("1.4", "1.2", 3))


@pytest.fixture(scope="module")
def correct(broker: Broker) -> Iterator[Run]:
    """An active run without faults. Shared, so tests only read it."""
    made = Run(broker, "audit-sound")
    made.write_active_run()
    made.write(TRAJECTORIES, trajectory(NAMES[0]))
    made.producer.send(BATCHES.name(made.run), b"rubbish", partition=1).get(timeout=10)
    made.write(SETTLED, replace(settled("p0.0", "dropped"), trajectory_id="p1"))
    made.write(BATCHES, replace(micro_batch(9), trajectory_ids=("p1",)), replace(micro_batch(1), batch=-1))
    made.write(TRAJECTORIES, replace(trajectory("p0.0"), member=-1))
    made.write(RELAY, manifest(f"{10**9}.0", None), replace(manifest("1.2", "1.1", 1), batches=(7, 8)))
    yield made
    made.producer.close()


@pytest.fixture(scope="module")
def damaged(broker: Broker) -> Iterator[Run]:
    """A run in which every stage lost a trajectory, with other faults. Shared, so tests only read it."""
    made = Run(broker, "audit-damaged")
    made.write_active_run()
    lose_in_placement(made)
    lose_at_score(made)
    lose_in_buffer(made)
    lose_in_evaluation(made)
    lose_before_batch(made)
    lose_at_trainer(made)
    made.write(SETTLED, settled("p7.0", "dropped", ""))
    made.write(BATCHES, micro_batch(1, NAMES[0]))
    yield made
    made.producer.close()


def test_audit_of_an_active_run_passes(correct: Run) -> None:
    found = audit(correct.client, correct.run)
    assert found.passed
    numbers = {name: number for name, number in found.numbers().items() if number}
    repeats = {"duplicate_finishes": 1, "undecodable": 7}
    assert numbers == {"dispatched": 8, "trained": 6, "dropped": 1, "in_flight": 1, **repeats}
    assert found.in_flight == {"score": 1}


def test_audit_names_exactly_the_planted_faults(damaged: Run) -> None:
    found = audit(damaged.client, damaged.run)
    assert found.lost == (
        ReachedStage("p3.1", "score"),
        *(ReachedStage(f"p{number}.0", "prompts") for number in (4, 5, 6)),
        ReachedStage("p8.0", "experience"),
        ReachedStage("p9.0", "experience"),
        ReachedStage("e9.0", "evaluation"),
        ReachedStage("p10.0", "training"),
        ReachedStage("p11.0", "placement"),
    )
    assert found.trained_twice == ("p0.0",)
    assert found.without_reason == ("p7.0",)
    assert not found.passed
    assert found.accounted == found.dispatched + found.undispatched


def test_background_process_writes_the_result_of_the_audit(damaged: Run, tmp_path: Path) -> None:
    config, out = tmp_path / "config.toml", tmp_path / "audit.json"
    config.write_text(f'[run]\nname = "{damaged.run}"\n[kafka]\nbootstrap_servers = "{damaged.servers}"\n')
    log = tmp_path / "audit.log"
    process = spawn(
        [sys.executable, "-m", background_process.__name__, str(config), str(out)], log, die_with_parent=True
    )
    process.wait(120)
    assert out.exists(), log.read_text()
    assert json.loads(out.read_text()) == audit(damaged.client, damaged.run).to_json()


def test_audit_ignores_aborted_and_waits_for_open_transactions(
    broker: Broker, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_admin, "STABLE_PAUSE_S", 5.0)
    name = EXPERIENCES.name(run_id)
    run = Run(broker, run_id)
    run.write(INBOX, assignment("p0.0"))
    run.write(TRAJECTORIES, trajectory("p0.0"))
    producer = KafkaProducer(bootstrap_servers=run.servers, transactional_id=group_name(run_id, "score"))
    producer.init_transactions()
    value, headers = encode(experience("p0.0"))
    for end in (producer.abort_transaction, producer.commit_transaction):
        producer.begin_transaction()
        producer.send(name, value, headers=list(headers), partition=0).get(timeout=10)
        pauses: list[float] = []

        def pause(seconds: float, end: Callable[[], None] = end, pauses: list[float] = pauses) -> None:
            pauses.append(seconds)
            if sum(pauses) == 85.0:  # the transaction of a killed role lasts for its time-out, 60 s, and longer
                end()
                wait_for_markers(run.client, name)

        with admin_client(run.client) as admin:
            with pytest.raises(RuntimeError, match="has been open for 40 s"):
                stable_ends(admin, name, 10.0, lambda _: None)
            stable_ends(admin, name, 60.0, pause)
        expected = "score" if end == producer.abort_transaction else "experience"
        assert audit(run.client, run_id).in_flight == {expected: 1}
    producer.close()
    run.producer.close()


def test_audit_finds_lost_trajectories_after_offsets_expired(broker: Broker, run_id: str) -> None:
    """Only the notes say what a role has consumed, then."""
    run = Run(broker, run_id)
    run.write(EXPERIENCES, *map(experience, NAMES[:2]))
    with admin_client(run.client) as admin:
        create_topics(admin, [TopicSpec(RESTORE.name(run_id), 1)])
    group = group_name(run_id, "experience")
    note = Note(1, offsets={f"{EXPERIENCES.name(run_id)}:0": 1}).encode()
    write_as_role(run.client, run_id, RESTORE, [CommitNote(group, note, 0)], key=group.encode())
    found = audit(run.client, run_id)
    assert found.lost == (ReachedStage(NAMES[0], "experience"),)
    assert found.in_flight == {"experience": 1}
    run.producer.close()


def test_audit_counts_deleted_records_as_expired(broker: Broker, run_id: str) -> None:
    run = Run(broker, run_id)
    run.write_active_run()
    run.producer.close()
    with admin_client(run.client) as admin:
        admin.delete_records({TopicPartition(BATCHES.name(run_id), 0): 1})
    found = audit(run.client, run_id)
    assert found.numbers()["expired"] == 3
    assert found.trained == 3
    assert found.passed


def test_audit_fails_for_an_unknown_run(correct: Run) -> None:
    with pytest.raises(RuntimeError, match="cannot be audited"):
        audit(correct.client, "never-was")


def laminar(run: Run, *arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(["runs", "audit", "--run", run.run, "-b", run.servers, *arguments])
    return int(exit_info.value.code or 0)


def test_audit_command_prints_a_passed_audit(correct: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert laminar(correct) == 0
    printed = capsys.readouterr().out
    assert "the audit passed: no trajectory lost or trained twice" in printed
    assert NAMES[7] not in printed
    assert laminar(correct, "--ended", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is True
    assert found["named"]["in_flight"] == [{"trajectory_id": NAMES[7], "stage": "score"}]


def test_audit_command_waits_for_the_time_out_of_the_run(
    correct: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    used: list[float] = []

    def ends(client: Any, topic: str, transaction_timeout_s: float, pause: Any) -> Mapping[int, int]:
        used.append(transaction_timeout_s)
        return stable_ends(client, topic, transaction_timeout_s, pause)

    monkeypatch.setattr("pipelines.inspect.audit.audit_run.stable_ends", ends)
    file = tmp_path / "runs" / correct.run / "config.toml"
    file.parent.mkdir(parents=True)
    for text in ("[kafka]\ntransaction_timeout_s = 7", "of = 'another release'"):
        file.write_text(text)
        assert laminar(correct) == 0
    assert list(dict.fromkeys(used)) == [7.0, 60.0]


def test_audit_command_names_all_faults(damaged: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert laminar(damaged) == 1
    printed = capsys.readouterr().out.splitlines()
    assert "AUDIT FAILED" in printed[0]
    for line in (
        "lost at prompts: p4.0, p5.0, p6.0",
        "lost at placement: p11.0",
        "lost at score: p3.1",
        "lost at experience: p8.0, p9.0",
        "lost at evaluation: e9.0",
        "lost at training: p10.0",
        "trained twice: p0.0",
        "dropped without a reason: p7.0",
    ):
        assert line in printed
