"""`laminar runs logs`, `compare`, `list`, `resume` and `drain`."""

from __future__ import annotations

import csv
import itertools
import json
import math
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from kafka import KafkaProducer
from record_samples import SAMPLES
from waiting import until

from infra.kafka.broker import Broker
from infra.kafka.session import Session
from infra.kafka.session_config import Input, Partition, SessionConfig
from pipelines.cli.main import main
from pipelines.config import Config, KafkaConfig, RunConfig, parse_config
from pipelines.inspect.submissions import Submission, submissions
from pipelines.run import drain as draining
from pipelines.run.drain import IDLE_CHECKS, drain, is_idle
from pipelines.run.topics import make_topics
from schemas.codec import encode
from schemas.records import Pause, Prompt, ReplicaStatus
from schemas.release import RELEASE
from schemas.topics import CONTROL, PROMPTS, REPLICAS, RESTORE, Topic, group_name

Runs = Callable[..., tuple[int, str, str]]


@pytest.fixture
def runs(tmp_path: Path, command: Callable[..., tuple[int, str, str]]) -> Runs:
    for name, steps in (("first", 10), ("second", 20)):
        folder = tmp_path / name
        (folder / "logs").mkdir(parents=True)
        ended = {"release": RELEASE, "run": name, "started_at": steps, "ended_at": steps + 10.0, "error": None}
        (folder / "state.json").write_text(json.dumps(ended))
        summary = {
            "run": name,
            "optimizer_steps": steps,
            "tokens_generated": 1000 * steps,
            "tokens_per_s": 20.0 * steps,
            "lost": 0,
            "reward_errors": 0,
            "heldout_after": 0.0,
            "tasks": {"rev": {"reward_first": 0.25, "reward_last": 0.5, "heldout_before": 0.0}},
            "components": {"exact": {"mean_first": 0.1, "mean_last": 0.2}},
        }
        if name == "first":
            del summary["tasks"]
        (folder / "summary.json").write_text(json.dumps({**summary, "reward_last": 1 / 3}))
        for role in ("score", "trainer"):
            (folder / "logs" / f"{role}.log").write_text("".join(f"{role} {n}\n" for n in range(30)))

    return lambda *words: command("runs", *words, "--folder", str(tmp_path))


def test_command_names_a_run_without_topics(command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    (tmp_path / "early").mkdir()
    ended = {"release": RELEASE, "run": "early", "started_at": 1.0, "ended_at": 2.0, "error": "SIGINT"}
    (tmp_path / "early" / "state.json").write_text(json.dumps(ended))
    code, _, err = command("samples", "--run", str(tmp_path / "early"))
    assert code == 2
    assert "run early ended before its topics were created" in " ".join(err.replace("│", " ").split())


def test_runs_logs_prints_last_lines(runs: Runs) -> None:
    code, out, _ = runs("logs", "-n", "2", "--run", "first")
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        [role, role, str(n)] for role in ("score", "trainer") for n in (28, 29)
    ]
    assert len(runs("logs", "score", "--run", "first")[1].splitlines()) == 20
    code, _, err = runs("logs", "scores", "--run", "first")
    assert code == 2
    assert "there are score, trainer" in " ".join(err.replace("│", " ").split())


def test_runs_logs_as_json_are_one_document_without_follow(runs: Runs) -> None:
    words = ("logs", "score", "-n", "2", "--run", "first")
    rows = [{"role": "score", "line": f"score {n}"} for n in (28, 29)]
    assert json.loads(runs(*words, "--json")[1]) == rows
    assert [json.loads(line) for line in runs(*words, "-O", "jsonl")[1].splitlines()] == rows
    code, _, err = runs(*words, "--json", "--follow")
    assert (code, "with --follow give -O jsonl" in " ".join(err.replace("│", " ").split())) == (2, True)


def test_report_takes_the_run_as_an_option_too(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("first", "second"):
        (tmp_path / name / "metrics.jsonl").touch()
    for words in (("first", "second"), ("first", "--run", "second"), ("--run", "second")):
        with pytest.raises(SystemExit) as ended:
            main(["report", *words, "--folder", str(tmp_path), "--no-log", "--json"])
        assert not ended.value.code
        written = Path(json.loads(capsys.readouterr().out)["file"])
        place = tmp_path / ("comparison.html" if len(words) > 1 and words[0] == "first" else "second/report.html")
        assert written == place
        assert "second" in place.read_text()


def test_runs_logs_of_a_role_are_those_of_its_shared_process(runs: Runs, tmp_path: Path) -> None:
    logs = tmp_path / "first" / "logs"
    (logs / "score.log").rename(logs / "light.log")
    for role in ("score", "experience-1", "light"):
        code, out, _ = runs("logs", role, "-n", "1", "--run", "first")
        assert (code, out.split()) == (0, ["light", "score", "29"])
    for unknown in ("scores", "rollout-0", "gateway-0"):
        assert runs("logs", unknown, "--run", "first")[0] == 2


def test_runs_compare_prints_a_column_per_run(runs: Runs) -> None:
    code, out, _ = runs("compare", "first", "second")
    assert code == 0
    rows: dict[str, list[str]] = {line.partition("  ")[0]: line.split()[-2:] for line in out.splitlines()}
    assert rows["optimizer steps"] == ["10", "20"]
    assert rows["tokens generated per second, first step to last"] == ["200.0", "400.0"]
    assert rows["mean reward, last tenth"] == ["0.333", "0.333"]
    assert rows["trajectories lost"] == ["0", "0"]
    assert rows["held-out accuracy after, greedy"] == ["0.000", "0.000"]
    assert rows["task rev: mean reward, last tenth"] == ["-", "0.500"]
    assert rows["component exact: mean, last tenth"] == ["0.200", "0.200"]
    assert "reward errors" not in rows  # 0 in both
    assert "The settings cannot be compared: " in out
    found: list[dict[str, Any]] = json.loads(runs("compare", "first", "second", "--json")[1])
    assert [each["tokens_generated"] for each in found] == [10_000, 20_000]
    assert runs("compare", "first", "nobody")[0] == 1


def test_runs_compare_lists_settings_that_differ(runs: Runs, tmp_path: Path) -> None:
    for name, steps in (("first", 10), ("second", 20)):
        text = f"[model]\npath = '/m'\n[run]\nname = '{name}'\n[trainer]\noptimizer_steps = {steps}\n"
        (tmp_path / name / "config.toml").write_text(text + "learner = {algorithm = {name = 'ppo'}}\n" * (steps == 20))
    out = runs("compare", "first", "second")[1]
    assert "Settings of first -> second: 2 differ (`" in out
    assert f" config --diff {tmp_path}/first {tmp_path}/second`)" in out
    assert out.splitlines()[-2:] == [
        '  trainer.learner.algorithm.name: "tis" -> "ppo"',
        "  trainer.optimizer_steps: 10 -> 20",
    ]


def test_runs_list_prints_csv_json_and_table(runs: Runs) -> None:
    rows = list(csv.DictReader(runs("list", "-O", "csv")[1].splitlines()))
    assert [(row["run"], row["status"]) for row in rows] == [("second", "ended"), ("first", "ended")]
    assert [row["run"] for row in json.loads(runs("list", "--json")[1])] == ["second", "first"]
    assert runs("list")[1].splitlines()[0].split() == [
        "RUN",
        "STATUS",
        "PHASE",
        "STARTED",
        "DURATION",
        "RESTARTS",
        "FOLDER",
    ]


def test_runs_resume_skips_finished_and_running_runs(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "first" / "report.html").touch()
    code, out, _ = runs("resume", "--run", "first")
    assert (code, out.partition(";")[0]) == (0, "nothing to resume: run first has reached its goal")
    assert "--set trainer.optimizer_steps=NUMBER" in out
    code, _, err = runs("resume", "--run", "second")
    assert code == 1
    assert "run second ended before its topics were created" in err
    state = json.loads((tmp_path / "second" / "state.json").read_text())
    process = psutil.Process()
    alive = {"pid": process.pid, "pid_created": process.create_time(), "ended_at": None}
    (tmp_path / "second" / "state.json").write_text(json.dumps(state | alive))
    assert runs("resume", "--run", "second")[:2] == (0, "nothing to resume: all of run second is running\n")


def test_runs_drain_rejects_run_without_submissions(runs: Runs) -> None:
    code, _, err = runs("drain", "--run", "first")
    assert code == 2
    assert "no pipeline submitted with --detach" in " ".join(err.replace("│", " ").split())


def test_is_quiet_after_dispatch_with_idle_replicas(broker: Broker, run_id: str) -> None:
    config: Config = replace(
        parse_config({}, "a test"), run=RunConfig(run_id), kafka=KafkaConfig(broker.bootstrap_servers)
    )
    make_topics(config)
    client = config.kafka.client()

    def write(topic: Topic, record: Any) -> None:
        value, headers = encode(record)
        with KafkaProducer(**client.producer()) as producer:
            producer.send(topic.name(run_id), value, b"0", list(headers), 0)

    idle = replace(SAMPLES[ReplicaStatus], running=0, waiting=0)  # type: ignore[type-var]
    inputs, restore = (Input(PROMPTS.name(run_id), (0,)),), Partition(RESTORE.name(run_id), 0)
    placement = SessionConfig(client, group_name(run_id, "placement"), inputs, restore)
    assert is_idle(config)
    write(REPLICAS, replace(idle, waiting=1))  # type: ignore[type-var]
    assert not is_idle(config)
    write(REPLICAS, idle)
    assert is_idle(config)
    session = Session(placement)
    write(PROMPTS, SAMPLES[Prompt])
    until(lambda: not is_idle(config))  # offsets are there once the markers of their transaction are written
    write(CONTROL, replace(SAMPLES[Pause], paused=True))  # type: ignore[type-var]
    assert is_idle(config)  # the prompt waits for the end of the pause
    write(CONTROL, replace(SAMPLES[Pause], paused=False))  # type: ignore[type-var]
    assert not is_idle(config)
    while not session.poll(0.5):
        pass
    session.commit([], session.positions(), {}, {}, last=True)
    session.close()
    until(lambda: is_idle(config))


@pytest.fixture
def submitted(tmp_path: Path) -> Iterator[list[Submission]]:
    """Four submitted pipelines of a run; on SIGTERM each process writes its pipeline to `stopped` and exits."""
    with ExitStack() as stack:
        for pipeline in ("trainer", "score", "prompts", "placement"):
            ready = tmp_path / f"{pipeline}.ready"
            trap = f"trap 'echo {pipeline} >> {tmp_path}/stopped; exit' TERM"
            script = f"{trap}; : > {ready}; while :; do sleep 0.02; done"
            process = stack.enter_context(subprocess.Popen(["sh", "-c", script]))
            stack.callback(process.kill)
            until(ready.exists)
            submission = Submission(tmp_path, pipeline, 0, "embedded", (), process.pid)
            submission.file.parent.mkdir(exist_ok=True)
            replace(submission, pid_created=psutil.Process(process.pid).create_time()).write()
        yield submissions(tmp_path)


def test_drain_stops_prompts_first_and_others_when_quiet(
    broker: Broker, run_id: str, submitted: list[Submission], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "CHECK_EVERY_S", 0.05)
    config = replace(parse_config({}, "a test"), run=RunConfig(run_id), kafka=KafkaConfig(broker.bootstrap_servers))
    make_topics(config)

    def publish_status(waiting: int) -> None:
        status = replace(SAMPLES[ReplicaStatus], running=0, waiting=waiting)  # type: ignore[type-var]
        value, headers = encode(status)
        with KafkaProducer(**config.kafka.client().producer()) as producer:
            producer.send(REPLICAS.name(run_id), value, b"0", list(headers), 0)

    lines: list[str] = []
    publish_status(waiting=1)
    checks, soon = itertools.count(), time.monotonic() + 60
    clock = SimpleNamespace(sleep=time.sleep, monotonic=lambda: math.inf if next(checks) > IDLE_CHECKS else 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(draining, "time", clock)  # the deadline is over after more checks than would do
        assert drain(submitted, config, soon, lines.append) == ["placement", "score", "trainer"]
    assert (tmp_path / "stopped").read_text().split() == ["prompts"]
    publish_status(waiting=0)
    assert drain(submitted, config, time.monotonic() + 60, lines.append) == []
    assert (tmp_path / "stopped").read_text().split() == ["prompts", "placement", "score", "trainer"]
