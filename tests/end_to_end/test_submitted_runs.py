"""Commands find the Kafka of a run of `laminar submit --detach` from its folder, and show its state."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from first_day import Shell, printed_commands
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.structs import OffsetAndMetadata
from laminar_runs import CommandServer
from record_samples import SAMPLES
from role_writer import write_as_role
from trainer_batches import make_batch
from waiting import until

from infra.kafka.broker import Broker, free_port
from pipelines.config import Config, KafkaConfig, load_config, parse_config, save_config
from pipelines.inspect.audit.result import Audit, ReachedStage
from pipelines.inspect.run_files import AUDIT_SO_FAR_FILE
from pipelines.inspect.run_state.events import GOAL_REACHED
from pipelines.inspect.submissions import Submission, submissions
from pipelines.roles import DATA_PLANE
from pipelines.run.topics import make_topics
from schemas.codec import encode
from schemas.records import Experience, Metric, PolicyVersion, WeightVersion
from schemas.topics import BATCHES, EXPERIENCES, METRICS, RELAY, group_name

INSPECTIONS = (
    (("topics", "lag"), 0, "experience"),
    (("topics", "tail", "experiences"), 0, "p12.3, v2.17"),
    (("runs", "audit"), 0, "the audit passed"),
    (("samples", "p12"), 0, "p12  chain_sum, 1 of 8 samples"),
)
"""Commands, their exit code, and what they print."""
MANIFEST = next(each for each in SAMPLES.values() if isinstance(each, WeightVersion))
SCORED = next(each for each in SAMPLES.values() if isinstance(each, Experience))


@pytest.fixture
def submitted(broker: Broker, run_id: str, tmp_path: Path) -> Path:
    """A run whose score runs, as far as its folder says; its topics have three optimizer steps and an experience.

    Its first metric is ten minutes old. The experience is not read yet.
    """
    settings = {"name": run_id, "folder": str(tmp_path / "elsewhere")}
    table: dict[str, Any] = {"run": settings, "kafka": {"bootstrap_servers": broker.bootstrap_servers}}
    config = parse_config({**table, "trainer": {"optimizer_steps": 7}}, "test")
    make_topics(config)
    respawner = {"pid": os.getpid(), "pid_created": psutil.Process().create_time()}
    submission = Submission(config.run_folder, "score", 0, "embedded", **respawner)
    submission.file.parent.mkdir(parents=True)
    submission.write()
    save_config(config, submission.config)
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers)
    now = time.time_ns() // 10**6
    first, *later = [Metric("trainer", step, {"reward/mean": 0.5}, now - 60_000) for step in (1, 2, 3)]
    write_as_role(config.kafka.client(), run_id, METRICS, [first], timestamp_ms=now - 600_000)
    write_as_role(config.kafka.client(), run_id, METRICS, later)
    value, headers = encode(replace(SCORED, error=None))
    producer.send(EXPERIENCES.name(run_id), value, b"k", list(headers), 0, now)
    producer.flush()
    producer.close()
    group = group_name(run_id, "experience")
    consumer = KafkaConsumer(bootstrap_servers=broker.bootstrap_servers, group_id=group, enable_auto_commit=False)
    consumer.commit({TopicPartition(EXPERIENCES.name(run_id), 0): OffsetAndMetadata(0, "", -1)})
    consumer.close(autocommit=False)
    return config.run_folder


@pytest.fixture
def shell(command_server: CommandServer, tmp_path: Path) -> Shell:
    """In another directory than the runs."""
    (tmp_path / "outputs").mkdir()
    return Shell(command_server, tmp_path / "here", tmp_path / "outputs")


def status_with_lag(shell: Shell, run: Path, topic: str) -> Any:
    """What `runs status --json` prints once it has the lag of `topic`: Kafka may answer too late for it."""
    answers: list[Any] = []

    def has_lag() -> bool:
        answers.append(shell("runs", "status", "--run", str(run), "--json").json)
        return topic in answers[-1]["lag"]

    until(has_lag)
    return answers[-1]


def test_commands_find_the_kafka_of_a_submitted_run(submitted: Path, run_id: str, shell: Shell) -> None:
    """From any directory, and in the one above the runs without a name."""
    for here, place in (
        (shell.here, ("--run", str(submitted))),
        (submitted.parent.parent, ("--run", f"elsewhere/{run_id}")),
    ):
        answer = shell("runs", "status", *place, "--json", here=here)
        assert answer.code == 0, answer.text
        status = answer.json
        assert (status["run"], status["optimizer_steps"], status["goal"], status["kafka"]) == (run_id, 3, 7, None)
        assert "3/7 steps" in shell("runs", "status", *place, here=here).text
        watched = shell("watch", "--plain", *place, here=here).text
        assert "3/7 steps" in watched
        assert re.search(r"training 1\d:\d\d · 1\d:\d\d in all", watched), watched
        for words, code, text in INSPECTIONS:
            answer = shell(*words, *place, here=here)
            assert (answer.code, text in answer.text) == (code, True), (words, answer.text)
            assert "bootstrap" not in answer.text, words
        compared = shell("runs", "compare", place[1], str(submitted), here=here).text
        assert re.search(r"^optimizer steps +3 +3", compared, re.M), compared
        assert "none differ" in compared
        assert "there is no run" not in shell("train", "replay", place[1], here=here).text
        audit = Audit(dispatched=12, lost=(ReachedStage("p1.0", "score"),)).to_json()
        (submitted / AUDIT_SO_FAR_FILE).write_text(json.dumps(audit))  # as the trainer's respawner
        written = shell("report", *place, here=here)
        (submitted / AUDIT_SO_FAR_FILE).unlink()
        assert written.code == 0, written.text
        page = (submitted / "report.html").read_text()
        assert "<td>optimizer steps</td><td>3</td>" in page
        assert "No trajectory was trained" not in page
        assert "audit FAILED" in page
        assert "optimizer_steps = 7" in page
        assert "The settings are equal." in shell("config", "--diff", place[1], str(submitted), here=here).text


def test_printed_commands_name_the_submitted_run(submitted: Path, shell: Shell) -> None:
    """A failed audit, a drain that needs a pause, and a pause of stopped processes."""
    audit = Audit(dispatched=3, lost=(ReachedStage("p1.0", "score"),)).to_json()
    (submitted / AUDIT_SO_FAR_FILE).write_text(json.dumps(audit))
    place = ["--run", str(submitted)]
    text = shell("runs", "status", *place).text
    assert re.search(r"^  audit +FAILED: 1 lost; `\S*laminar [^`]*` lists them \(\d+ s ago\)$", text, re.M), text
    assert printed_commands(text) == [["runs", "audit", *place]]
    assert "the audit passed" in shell(*printed_commands(text)[0]).text

    (score,) = submissions(submitted)
    plane = replace(score, pipeline=DATA_PLANE)
    plane.write()
    save_config(load_config(score.config), plane.config)
    answer = shell("runs", "drain", *place)
    assert (answer.code, "is one job, whose prompts cannot stop alone" in answer.text) == (2, True), answer.text
    assert printed_commands(answer.text) == [["runs", "pause", *place]]
    plane.file.unlink()
    replace(score, state="ended", pid=None).write()
    answer = shell(*printed_commands(answer.text)[0])
    assert (answer.code, "its processes are stopped" in answer.text) == (0, True), answer.text
    assert printed_commands(answer.text) == [["runs", "resume", *place]]


def test_status_of_an_ended_run_lists_its_roles_at_once(submitted: Path, shell: Shell) -> None:
    (submission,) = submissions(submitted)
    place = ("--run", str(submitted))
    before = status_with_lag(shell, submitted, "experiences")
    assert (before["waits_for"], before["lag"]) == ("the first heartbeat of a replica", {"experiences": 1})
    error = f"no disk (see {submission.log})"
    replace(submission, restarts=2, last_error=error, last_ended_at=time.time() - 5).write()
    config = load_config(submission.config)
    save_config(replace(config, trainer=replace(config.trainer, optimizer_steps=3)), submission.config)
    reached = shell("runs", "status", *place, "--json").json
    assert reached["phase"] == GOAL_REACHED
    assert re.fullmatch(rf"its end: `\S*laminar runs drain --run {submitted}`", reached["waits_for"])
    assert (reached["roles"]["score"]["last_error"], reached["roles"]["score"]["log"]) == (error, str(submission.log))
    text = shell("runs", "status", *place).text
    assert f"run {submitted.name}: running, {GOAL_REACHED}, 3/3 steps" in text
    assert re.search(rf"^  score +up, .*2 restarts.*\n +last ended \d+ s ago: {re.escape(error)}$", text, re.M), text
    save_config(config, submission.config)
    replace(submission, state="ended").write()
    status = shell("runs", "status", *place, "--json").json
    assert (status["status"], status["waits_for"], status["lag"]) == ("ended", None, {})
    text = shell("runs", "status", *place).text
    assert "waits for" not in text
    assert re.search(r"^  score +ended$", text, re.M), text
    assert "waits for" not in shell("watch", "--plain", *place).text
    replace(submission, pid=2**22 + 5).write()
    answer = shell("runs", "status", *place)
    assert answer.code == 1
    assert re.search(r"score died, training, 3/7 steps", answer.text), answer.text
    assert re.search(r"^  score +died$", answer.text, re.M), answer.text
    assert shell("runs", "status", *place, "--json").json["phase"] == "training"


def test_batches_beyond_the_goal_are_no_lag_and_nothing_is_left(submitted: Path, shell: Shell, tmp_path: Path) -> None:
    (submission,) = submissions(submitted)
    config = load_config(submission.config)
    client, place = config.kafka.client(), ("--run", str(submitted))
    write_as_role(client, submitted.name, BATCHES, make_batch(number=3))
    consumer = KafkaConsumer(
        **client.consumer(group_id=group_name(submitted.name, "trainer"), enable_auto_commit=False)
    )
    consumer.commit({TopicPartition(BATCHES.name(submitted.name), 0): OffsetAndMetadata(0, "", -1)})
    consumer.close(autocommit=False)
    words = ("topics", "lag", *place)

    def lag() -> dict[str, int]:
        (row,) = [row for row in shell(*words, "--json").json if row["topic"] == BATCHES.name(submitted.name)]
        return {name: row[name] for name in ("lag", "beyond_goal")}

    assert lag() == {"lag": 2, "beyond_goal": 0}  # with the marker of the transaction
    write_as_role(client, submitted.name, RELAY, [replace(MANIFEST, version=PolicyVersion(1, 3), final=True)])
    save_config(replace(config, trainer=replace(config.trainer, optimizer_steps=3)), submission.config)
    assert lag() == {"lag": 0, "beyond_goal": 2}
    assert "0 (2 beyond the goal, not needed)" in shell(*words).text
    line = re.compile(r"^  lag +experiences 1 · batches: 2 beyond the goal, not needed$", re.M)
    until(lambda: line.search(shell("runs", "status", *place).text))  # Kafka may answer too late for it
    status = status_with_lag(shell, submitted, "batches")
    assert (status["lag"]["batches"], status["batches_beyond_goal"]) == (0, 2)

    goal = replace(config.trainer, optimizer_steps=3)
    trains = replace(config, trainer=goal)
    evaluates = replace(trains, prompts=replace(config.prompts, heldout=4))
    secrets = KafkaConfig(client_properties=str(tmp_path / "{role}.properties"))  # without admin.properties

    def resume(role: str, config: Config) -> tuple[int, str]:
        added = replace(submission, pipeline=role)
        added.write()
        save_config(config, added.config)
        answer = shell("runs", "resume", *place)
        return answer.code, answer.text

    is_running = (0, f"nothing to resume: all of run {submitted.name} is running\n")
    assert resume("score", trains) == is_running  # it may have been extended where its trainer is
    assert resume("trainer", evaluates) == is_running  # evaluation is elsewhere
    save_config(replace(trains, kafka=secrets), submission.config)
    assert resume("trainer", replace(trains, kafka=secrets)) == is_running
    save_config(trains, submission.config)
    nothing = f"nothing to resume: run {submitted.name} has reached its goal; to extend it: "
    extend = f"{nothing}--set trainer.optimizer_steps=NUMBER\n"
    assert resume("trainer", trains) == (0, extend)
    evaluated = Metric("evaluation", 3, {"accuracy/greedy": 0.5, "accuracy/sampled": 0.5, "final": 1.0}, 1)
    write_as_role(client, submitted.name, METRICS, [evaluated])
    save_config(evaluates, submitted / "submitted" / "trainer.toml")
    assert resume("evaluation", evaluates) == (0, extend)
    (submitted / "submitted" / "evaluation.json").unlink()
    save_config(trains, submitted / "submitted" / "trainer.toml")
    for state, pid in (("up", submission.pid), ("ended", None)):
        replace(submission, state=state, pid=pid).write()
        answer = shell("runs", "resume", *place)
        assert (answer.code, answer.text) == (0, extend)
    assert submissions(submitted)[0].pid is None
    (submitted / "submitted" / "trainer.json").unlink()
    save_config(config, submission.config)  # with four more steps to train
    accepts = shell("runs", "resume", *place, "--set", "rollout.slots=3")
    assert (accepts.code, "rollout.slots cannot change in a resumed run" in accepts.text) == (1, True), accepts.text


def test_chat_and_dry_run_name_what_a_run_lacks(submitted: Path, shell: Shell) -> None:
    answer = shell("chat", "hello", "--run", str(submitted))
    assert answer.code == 1
    assert f"run {submitted.name} has no gateway: one belongs to a run from its start, by a section" in answer.text
    assert "there is no run 'other'" in shell("chat", "hello", "--run", str(submitted.parent / "other")).text
    file = str(submitted / "submitted" / "score.toml")
    answer = shell("submit", "score", file, "--dry-run", "--set", "run.name=''", "--json")
    assert answer.code == 1
    assert "run.name is not set: it names the topics to read and write" in answer.json["missing"]


def test_status_of_a_submitted_run_names_unreachable_kafka(submitted: Path, shell: Shell) -> None:
    file = submitted / "submitted" / "score.toml"
    config = parse_config({"run": {"name": submitted.name, "folder": str(submitted.parent)}}, "test")
    address = f"127.0.0.1:{free_port()}"
    save_config(replace(config, kafka=KafkaConfig(bootstrap_servers=address)), file)
    answer = shell("runs", "status", "--run", str(submitted), "--json")
    assert answer.code == 0
    assert address in answer.json["kafka"]
    assert "Kafka does not respond" in shell("runs", "status", "--run", str(submitted)).text


def test_detach_refuses_at_once_what_its_process_would_refuse(
    submitted: Path, shell: Shell, tmp_path: Path, model_folder: Path
) -> None:
    model, file, address = tmp_path / "model", str(submitted / "submitted" / "score.toml"), f"127.0.0.1:{free_port()}"
    model.mkdir()
    with (model / "model.safetensors").open("wb") as weights:
        weights.truncate(1 << 40)  # more parameters than shared memory has bytes
    changes = ("--set", f"model.path={model}", "--set", "kafka.partitions=4")
    answer = shell("submit", "trainer", file, "--detach", *changes)
    assert answer.code == 2, answer.text
    assert re.search(
        r"^  relay\.store: .* free, but 2 weight versions of \d+ parameters need \d+\.0 GiB", answer.text, re.M
    )
    topics = rf"laminar\.{submitted.name}\.experiences and 1 more topic have 1 partition, a number that is fixed"
    advice = "set kafka.partitions back to 1, or choose another run name"
    assert re.search(rf"^  kafka\.partitions is 4, but {topics} for a run: {advice}$", answer.text, re.M), answer.text
    answer = shell("submit", "placement", file, "--detach", "--set", f"kafka.bootstrap_servers={address}")
    assert answer.code == 2
    assert f"kafka.bootstrap_servers is '{address}', but Kafka does not answer there: " in answer.text
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        answer = shell("submit", "gateway", file, "--detach", "--set", f"gateway.port={port}")
    assert answer.code == 2
    assert f"gateway.port: 127.0.0.1:{port} cannot be used: Address already in use" in answer.text
    (tmp_path / "mine.py").write_text('def fails(text):\n    return {}["answr"]\n')
    own = f"score.rewards=[{{name='{tmp_path}/mine.py:fails'}}]"
    lost = f"score.rewards=[{{name='{tmp_path}/mine.py:lost'}}]"
    rows = f"prompts.path={tmp_path}/rows.jsonl"
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n{"answer": "2"}\n')
    prompts = (f"model.path={model_folder}", "prompts.source=jsonl", rows, "prompts.heldout=0")
    for role, settings, problem in (
        ("score", (own, *prompts), "mine.py:fails fails on "),
        ("score", (lost,), "has no function 'lost'"),  # the prompts are on another machine
        ("prompts", prompts, "'chain_sum': 50.0 % of 2 rows (no question 1) are refused "),
        ("trainer", (*prompts, "trainer.learner.learning_rate=0.0"), "the model would not change"),
        ("experience", ("prompts.samples_per_prompt=1",), "prompts.samples_per_prompt = 1, task "),
    ):
        changes = ("run.name=other", "run.allow_no_learning=false", *settings)
        answer = shell("submit", role, file, "--detach", *(word for each in changes for word in ("--set", each)))
        assert (answer.code, problem in answer.text) == (2, True), (role, answer.text)
    assert not (submitted.parent / "other").exists()
    assert [each.role.name for each in submissions(submitted)] == ["score"]


def test_detach_refuses_a_role_that_runs_in_the_foreground(submitted: Path, shell: Shell) -> None:
    """It would fence the other. One that waits for Kafka is there, too."""
    file = str(submitted / "submitted" / "score.toml")
    command = shell.start("submit", "placement", file)
    try:
        command.until(lambda: "start 1 of " in command.output(), 60, "its start")
        answer = shell("submit", "placement", file, "--detach")
        assert answer.code == 1
        running = f"placement of run {submitted.name} runs in the foreground, as process {command.pid}: "
        assert f"{running}`kill {command.pid}` drains and ends it; then submit again" in answer.text
        assert [each.role.name for each in submissions(submitted)] == ["score"]
        command.signal(signal.SIGTERM)
        assert command.wait(60) == 0
    finally:
        command.clean_up()
    words = ("submit", "placement", file, "--set", f"kafka.bootstrap_servers=127.0.0.1:{free_port()}")
    waiting = shell.start(*words)
    try:
        waiting.until(lambda: "127.0.0.1:" in waiting.output(), 60, "its wait for Kafka")
        assert f"runs in the foreground, as process {waiting.pid}: " in shell(*words, "--detach").text
    finally:
        waiting.clean_up()


def test_submit_refuses_a_role_that_is_submitted_already(submitted: Path, shell: Shell) -> None:
    """In the foreground it would fence the other."""
    for role in ("score", "data-plane"):
        answer = shell("submit", role, str(submitted / "submitted" / "score.toml"))
        assert answer.code == 1
        process = f"its respawner is process {os.getpid()}"
        assert f"score of run {submitted.name} is submitted already; {process}" in answer.text
        assert re.search(rf"`\S*laminar runs status --run {submitted}` shows it", answer.text), answer.text
        assert re.search(rf"`\S*laminar runs stop --role score --run {submitted}` ends it", answer.text)
