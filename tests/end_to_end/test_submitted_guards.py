"""Submitted roles stop themselves when the run cannot learn: no supervisor watches them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from first_day import printed_commands
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.structs import OffsetAndMetadata
from laminar_runs import CommandServer
from record_samples import PROMPT, TRAJECTORY
from role_writer import write_as_role
from synthetic_run import heartbeat
from test_submit import submit
from trainer_batches import make_batch

from infra.kafka.broker import Broker
from infra.kafka.note import Note
from infra.kafka.topic_reader import read_topic
from infra.runners.stopping import STOPPING
from infra.store.names import default_root
from infra.store.ownership import remove_store
from pipelines.config import load_config
from pipelines.inspect.run_state.state import RunState
from pipelines.inspect.submissions import Submission
from pipelines.roles import submitted_process
from pipelines.run import run_guard
from pipelines.run.run_guard import RunFailing, RunGuard
from pipelines.run.submission.guard import guarded
from pipelines.run.topics import make_topics
from schemas.codec import encode
from schemas.records import CommitNote, Experience, Metric
from schemas.topics import (
    BATCHES,
    EXPERIENCES,
    INBOX,
    METRICS,
    PROMPTS,
    REPLICAS,
    RESTORE,
    TRAJECTORIES,
    Topic,
    group_name,
)


def write_config(folder: Path, broker: Broker, run: str, **sections: object) -> Path:
    table = {
        "run": {"name": run, "folder": str(folder / "runs"), "stop_error_window": 8, **sections.pop("run", {})},  # type: ignore[dict-item]
        "kafka": {"bootstrap_servers": broker.bootstrap_servers},
        **sections,
    }
    file = folder / f"{run}.toml"
    file.write_text(tomli_w.dumps(table))
    return file


def test_submitted_score_stops_when_every_reward_fails(
    command_server: CommandServer, broker: Broker, run_id: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text('def fails(text):\n    return {}["answr"]\n')
    rewards = {"rewards": [{"name": f"{tmp_path}/mine.py:fails"}]}
    file = write_config(tmp_path, broker, run_id, prompts={"task": "gcd"}, score=rewards)
    make_topics(load_config(file))
    prompt = replace(PROMPT, samples=8, environment="")
    with KafkaProducer(bootstrap_servers=broker.bootstrap_servers) as producer:
        for member in range(8):
            value, headers = encode(replace(TRAJECTORY, prompt=prompt, member=member))
            producer.send(TRAJECTORIES.name(run_id), value, b"p", list(headers))
    command = submit(command_server, tmp_path / "here", "score", str(file))
    assert command.wait() == 2  # its respawner does not submit it again
    output = command.output()
    assert "laminar: the run was stopped, because it cannot learn: errors in 100 % of 8 trajectories" in output
    assert "fails: KeyError: 'answr' (mine.py:2)" in output
    assert f'File "{tmp_path}/mine.py", line 2, in fails' in output
    scored = [row for record in read_topic(broker.client(), EXPERIENCES.name(run_id)) for row in record.rows]
    assert sum(isinstance(row, Experience) for row in scored) == 8  # it committed before it ended


def test_submitted_trainer_ends_at_a_missing_batch(
    command_server: CommandServer, broker: Broker, run_id: str, tmp_path: Path
) -> None:
    """The buffer has made three batches: the log has lost batch 0, however often the trainer starts."""
    settings = {"rollout": {"engine": "emulated"}, "trainer": {"missing_batch_wait_s": 0.0}}
    file = write_config(tmp_path, broker, run_id, prompts={"source": "synthetic"}, **settings)
    make_topics(load_config(file))
    with KafkaProducer(bootstrap_servers=broker.bootstrap_servers) as producer:
        value, headers = encode(make_batch(number=2)[0])
        producer.send(BATCHES.name(run_id), value, None, list(headers))
    group = group_name(run_id, "experience")
    note = CommitNote(group, Note(1, state={"batch": 3}).encode(), 0)
    write_as_role(broker.client(), run_id, RESTORE, [note], key=group.encode())
    command = submit(command_server, tmp_path / "here", "trainer", str(file))
    assert command.wait() == 2  # its respawner does not submit it again
    assert "laminar: global batch 0 is missing in batches partition 0: batch 2 is at offset 0" in command.output()
    remove_store(default_root(run_id))


def test_submitted_prompts_stop_when_too_many_rows_are_refused(
    command_server: CommandServer, model_folder: Path, broker: Broker, run_id: str, tmp_path: Path
) -> None:
    good = [{"question": f"{number} + 1", "answer": str(number + 1)} for number in range(250)]
    rows = [*good, *[{"question": "1 + " * 400 + "1", "answer": "1"}] * 30]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = write_config(
        tmp_path,
        broker,
        run_id,
        model={"path": str(model_folder)},
        prompts={
            "source": "jsonl",
            "path": str(tmp_path / "rows.jsonl"),
            "shuffle": False,
            "samples_per_prompt": 2,
            "tasks": [{"name": "rows"}],
        },
        placement={"prompt_lead": 300},
    )
    own = Submission(load_config(file).run_folder, "prompts", 0, "embedded")
    own.file.parent.mkdir(parents=True)
    own.write()  # as its respawner
    command = submit(command_server, tmp_path / "here", "prompts", str(file))
    assert command.wait() == 2
    output = command.output()
    assert "of the rows of task 'rows' are refused, more than prompts.max_refused_share = 0.05" in output
    assert "(too long " in output
    assert re.search(rf"max_refused_share = 0\.\d+ of this task in {re.escape(str(file))}; once", output), output
    assert printed_commands(output)[-1][:3] == ["runs", "resume", "--run"]  # the file has all that is to change


def test_submitted_trainer_ends_if_checkpoints_cannot_be_written(
    command_server: CommandServer, model_folder: Path, broker: Broker, run_id: str, tmp_path: Path
) -> None:
    file = write_config(tmp_path, broker, run_id, model={"path": str(model_folder)}, trainer={"checkpoint_tries": 1})
    checkpoints = tmp_path / "runs" / run_id / "checkpoints"
    checkpoints.parent.mkdir(parents=True)
    checkpoints.touch()
    command = submit(command_server, tmp_path / "here", "trainer", str(file))
    assert command.wait() == 2  # its respawner does not submit it again
    assert f"checkpoints cannot be written to {checkpoints} on machine " in command.output()
    remove_store(default_root(run_id))


@pytest.fixture
def unstopped() -> Iterator[None]:
    """A guard in this process stops the process's role: the request must not stay for the next test."""
    yield
    STOPPING.clear()


@pytest.mark.usefixtures("unstopped")
def test_submitted_prompts_end_when_nothing_is_left_to_train(
    broker: Broker, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `laminar run` does: it has drawn all questions, every replica is idle, and nothing waits for score."""
    monkeypatch.setattr(run_guard, "END_MS", 1)
    file = write_config(tmp_path, broker, run_id, prompts={"task": "gcd", "size": 20, "epochs": 1})
    config = load_config(file)
    make_topics(config)
    client = config.kafka.client()
    write_as_role(client, run_id, PROMPTS, [PROMPT])

    def commit(role: str, topic: Topic, offset: int) -> None:
        with closing(
            KafkaConsumer(**client.consumer(group_id=group_name(run_id, role), enable_auto_commit=False))
        ) as at:
            at.commit({TopicPartition(topic.name(run_id), 0): OffsetAndMetadata(offset, "", -1)})

    for role, topic in (("rollout", INBOX), ("score", TRAJECTORIES), ("placement", PROMPTS)):
        commit(role, topic, 0)
    buffer = Submission(config.run_folder, "experience", 0, "embedded", state="failed", error="no memory")
    buffer.file.parent.mkdir(parents=True)
    buffer.write()
    observed: list[RunState] = []
    check_end = RunGuard.check_end

    def observe(guard: RunGuard, state: RunState, *arguments: Any) -> None:
        observed.append(state)
        check_end(guard, state, *arguments)

    monkeypatch.setattr(RunGuard, "check_end", observe)
    blocked = iter(
        [
            (
                lambda state: state.undispatched,
                lambda: commit("placement", PROMPTS, 2),
            ),  # with the transaction's marker
            (lambda state: state.roles and not state.undispatched, lambda: buffer.ended("ended").write()),
        ]
    )
    drawn = {"prompts": 9.0, 'drawn{task="gcd"}': 9.0, "exhausted": 1.0}

    def run_until_stopped() -> None:
        with KafkaProducer(**client.producer()) as replica, guarded(config, file, submitted_process(config, "prompts")):
            now = time.time_ns() // 10**6
            behind = now - 3_600_000  # on Flink the metric has the clock of a task manager
            metrics = [Metric("score", 36, {"trajectories": 36.0}, now), Metric("prompts", 9, drawn, behind)]
            write_as_role(client, run_id, METRICS, metrics)
            is_blocked, unblock = next(blocked)
            while not STOPPING.wait(0.1):
                assert time.monotonic() < deadline, f"prompts still wait: {observed[-1:]}"
                if sum(map(bool, map(is_blocked, observed))) > 3:
                    unblock()
                    is_blocked, unblock = next(blocked, (lambda state: False, lambda: None))
                idle = replace(heartbeat(0, time.time_ns() // 10**6, 0), running=0, waiting=0)
                value, headers = encode(idle)
                replica.send(REPLICAS.name(run_id), value, b"0", list(headers), 0)

    deadline = time.monotonic() + 60
    with pytest.raises(RunFailing, match="all 9 questions are drawn") as failure:
        run_until_stopped()
    assert next(blocked, None) is None  # it waited for placement and for the buffer
    assert failure.value.resume == "--set prompts.epochs=2"
