"""A run that cannot start prints one line with the reason, before it starts any process if possible."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import socket
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import pytest
from laminar_runs import LaminarRun, StartRun

from infra.kafka.admin import TopicSpec, admin_client, create_topics, list_topics
from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from infra.kafka.readiness import wait_for_brokers
from infra.store.names import default_root
from infra.store.ownership import remove_store
from infra.store.weight_store import WeightStore
from pipelines.cli.main import main
from pipelines.config import load_config, read_config
from pipelines.run import run_kafka as kafka_of_run
from pipelines.run import trial
from pipelines.run.local import run_locally
from pipelines.run.start_checks import check_start
from pipelines.run.stop_requests import StopRequests
from pipelines.run.topics import make_topics
from schemas.topics import SETTLED

UNTRIED = "run.check_timeout_s=0"
"""The start does not try prompts and rewards after another problem, which takes seconds."""


def error_line(run: LaminarRun) -> str:
    """The single line of output of a command that failed."""
    assert run.wait(60) == 1
    (line,) = run.output().splitlines()
    return line


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("trainer.optimiser_steps=3", "--set: unknown key trainer.optimiser_steps; did you mean 'optimizer_steps'?"),
        ("trane.optimizer_steps=3", "--set: unknown key trane; did you mean 'trainer'?"),
        ("trainer.optimizer_steps=many", "--set: trainer.optimizer_steps: "),
        ("experience.global_batch=0", "--set: experience: global_batch must be at least 1, not 0"),
        ("experience=3", "experience: "),
        ("nonsense", "--set 'nonsense': expected section.key=value"),
        ("model.path=/nowhere/at/all", "model.path: there is no folder /nowhere/at/all"),
        ('prompts={source = "jsonl", path = "/nowhere.jsonl"}', "prompts.path: /nowhere.jsonl does not exist"),
        ('score.rewards=[{name = "/nowhere.py:mine"}]', "score.rewards: /nowhere.py does not exist"),
        ("kafka.client_properties=/nowhere.properties", "kafka.client_properties: /nowhere.properties does not exist"),
        ("kafka.bootstrap_servers=nowhere", "kafka: bootstrap.servers='nowhere': not a list of host:port"),
        ("relay.token_file=/dev/null", "relay: token_file: /dev/null has no secret in its first line"),
        ("rollout.replicas=99", "placement.max_replicas"),
        (
            "prompts.samples_per_prompt=64",
            "prompts.samples_per_prompt = 64 is more than the limit of",
        ),
        pytest.param(
            "rollout.engine=vllm",
            "rollout.engine is 'vllm', which is not installed: pip install '.[vllm]' in a checkout",
            marks=pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed"),
        ),
    ],
)
def test_run_rejects_an_invalid_configuration(change: str, expected: str, start_run: StartRun, run_id: str) -> None:
    run = start_run(run_id, change, UNTRIED)
    line = error_line(run)
    assert line.startswith("laminar: ")
    assert expected in line
    assert not run.folder.exists()


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer"])
def test_run_names_missing_model_files(
    missing: str, model_folder: Path, tmp_path: Path, start_run: StartRun, run_id: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    for file in folder.glob(f"{missing}*"):
        file.unlink()
    run = start_run(run_id, f"model.path={folder}", UNTRIED)
    assert f"model.path: {folder} has no " in error_line(run)
    assert not run.folder.exists()


MISTAKES = {
    "prompts.heldout_path": "/nowhere/heldout.jsonl",
    "prompts.prompt_column": "instrution",
    "score.rewards": '[{name = "mine.py:shap"}, {name = "mine.py:raises"}]',
}


def test_run_names_all_mistakes_at_once(start_run: StartRun, run_id: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"instruction": "1 + 1?", "answer": "2"}\n' * 8)
    (tmp_path / "mine.py").write_text("def raises(text): return {}['answr']\n")
    run = start_run(
        run_id,
        'prompts.source="jsonl"',
        f"prompts.path={tmp_path}/rows.jsonl",
        *(f"{key}={value}" for key, value in MISTAKES.items()),
        here=tmp_path,
    )
    assert run.wait(120) == 1
    output = run.output()
    assert "prompts.heldout_path: /nowhere/heldout.jsonl does not exist" in output
    assert "no value in column instrution (the row has answer, instruction)" in output
    assert "has no function 'shap'" in output
    assert not run.folder.exists()
    assert "Kafka" not in output


@pytest.mark.parametrize("option", [(), ("--detach",), ("--dry-run",)], ids=["foreground", "detached", "dry-run"])
def test_submit_names_all_mistakes_at_once(
    option: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"instruction": "1 + 1?", "answer": "2"}\n' * 8)
    (tmp_path / "mine.py").write_text("def raises(text): return {}['answr']\n")
    wrong = (
        *('prompts.source="jsonl"', f"prompts.path={tmp_path}/rows.jsonl", "prompts.prompt_column=instruction"),
        *(f'score.rewards=[{{name="{tmp_path}/mine.py:raises"}}]', f"run.folder={tmp_path}/runs"),
        *("prompts.max_token=5", "prompts.heldout=many", "experience.global_batch=0", "model.path=/nowhere"),
    )
    (tmp_path / "empty.toml").write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["submit", "score", str(tmp_path / "empty.toml"), *option, *(f"--set={each}" for each in wrong)])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    for expected in (
        "--set: unknown key prompts.max_token; did you mean 'max_new_tokens'?",
        "--set: prompts.heldout: Input should be a valid integer (it is 'many')",
        "--set: experience: global_batch must be at least 1, not 0",
        "run.name is not set",
        "kafka.bootstrap_servers is not set",
    ):
        assert printed.count(expected) == 1, printed
    assert ("mine.py:raises fails on each of the first 8 prompts" in printed) == (option == ("--detach",))
    assert not (tmp_path / "runs").exists()


def test_check_reports_as_a_start_and_starts_nothing(
    small_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(*changes: str) -> tuple[int, dict[str, Any]]:
        known = (f"run.folder={tmp_path}", "trainer.learner.learning_rate=2e-4")
        words = [word for change in (*known, *changes) for word in ("--set", change)]
        with pytest.raises(SystemExit) as ended:
            main(["run", str(small_config), "--check", "--json", *words])
        return int(ended.value.code or 0), json.loads(capsys.readouterr().out)

    code, found = check()
    assert (code, found["problems"], found["warnings"]) == (0, [], [])
    assert len(found["tried"]) == 1
    code, found = check("trainer.learner.learning_rate=0", 'score.rewards=[{name="nowhere.py:mine"}]')
    assert code == 1
    assert [problem.partition(":")[0] for problem in found["problems"]] == [
        "score.rewards",
        "trainer.learner.learning_rate = 0",
    ]
    assert list(tmp_path.iterdir()) == []


def test_run_rejects_an_existing_run_folder(start_run: StartRun, run_id: str, tmp_path: Path) -> None:
    state = tmp_path / "runs" / run_id / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text("{}")
    (state.parent / "config.toml").write_text("")
    assert f"run {run_id!r} exists already in" in error_line(start_run(run_id, here=tmp_path))
    assert state.read_text() == "{}"


def test_run_names_an_unreachable_broker(
    small_config: Path, tmp_path: Path, run_id: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = itertools.count(0.0, 0.5).__next__  # each reading is 0.5 s later, whatever the load
    monkeypatch.setattr(kafka_of_run, "wait_for_brokers", partial(wait_for_brokers, clock=clock))
    monkeypatch.setattr(kafka_of_run, "WAIT_S", 1.5)
    with socket.socket() as unbound:
        unbound.bind(("127.0.0.1", 0))  # bound, but not listening
        address = f"127.0.0.1:{unbound.getsockname()[1]}"
        changes = [f"run.name={run_id}", f"run.folder={tmp_path}", f"kafka.bootstrap_servers={address}"]
        expectation = pytest.raises(
            kafka_of_run.BrokerUnreachable, match=rf"no Kafka broker responded at {address} in 1\.5 s"
        )
        with expectation, StopRequests() as stops:
            run_locally(load_config(small_config, changes), small_config, stops)
    attempts = [line for line in capsys.readouterr().out.splitlines() if f"waiting for Kafka at {address}" in line]
    assert len(attempts) == 1  # at once, and then every 10 s
    assert '"phase": "failed"' in (tmp_path / run_id / "state.json").read_text()


def test_signal_ends_the_checks_at_once(
    small_config: Path, tmp_path: Path, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While all problems are looked for, which takes a while."""

    def try_all(*_: object, **__: object) -> NoReturn:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("it was not interrupted")

    monkeypatch.setattr(trial, "all_problems", try_all)
    changes = [f"run.name={run_id}", f"run.folder={tmp_path / 'runs'}", "model.path=/nowhere"]
    with StopRequests() as stops:
        report = check_start(read_config(small_config, changes), stops)
    assert report is not None
    assert report.exit_code == 128 + signal.SIGTERM
    assert not (tmp_path / "runs").exists()


def test_run_rejects_existing_topics(start_run: StartRun, broker: Broker, small_config: Path, run_id: str) -> None:
    client = ClientProperties.at(broker.bootstrap_servers)
    changes = [f"run.name={run_id}", f"kafka.bootstrap_servers={broker.bootstrap_servers}"]
    make_topics(load_config(small_config, changes))
    run = start_run(run_id, changes[1])
    assert run.wait(60) == 1
    where = f"Kafka at {client.bootstrap_servers}"
    expected = f"laminar: {where} already has topics of a run {run_id!r}: choose another run.name"
    assert run.output().splitlines()[-1] == expected
    assert not run.leftovers()


def test_commands_refuse_an_unsuitable_kafka(
    start_run: StartRun, broker: Broker, small_config: Path, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any record is written: not even topics are created."""
    address = f"kafka.bootstrap_servers={broker.bootstrap_servers}"
    run = start_run(run_id, address, "kafka.transaction_timeout_s=3600")
    assert run.wait(60) == 1
    assert "broker 1: transaction.max.timeout.ms is 900000, must be at least 3600000: " in run.output()
    with admin_client(broker.client()) as admin:
        assert list_topics(admin, f"laminar.{run_id}.") == []
        unsuitable = {"retention.ms": "604800000", "max.message.bytes": "1048588"}
        create_topics(admin, [TopicSpec(SETTLED.name(run_id), 1, config=unsuitable)])
        changes = ["--set", f"run.name={run_id}", "--set", address]
        for command in ("doctor",), ("submit", "score"), ("submit", "score", "--detach"):
            with pytest.raises(SystemExit) as ended:
                main([*command, str(small_config), *changes])
            assert ended.value.code
            printed = "".join(capsys.readouterr())
            for problem in "retention.ms is 604800000, must be -1: ", "max.message.bytes is 1048588, must be at least ":
                assert f"{SETTLED.name(run_id)}: {problem}" in printed, command
        assert list_topics(admin, f"laminar.{run_id}.") == [SETTLED.name(run_id)]


def test_run_rejects_the_store_of_an_active_run(start_run: StartRun, run_id: str) -> None:
    with WeightStore(default_root(run_id), 1):
        run = start_run(run_id, f"relay.store={default_root(run_id)}")
        assert run.wait(60) == 1
        assert "laminar: relay.store: " in run.output()
        assert f"is in use by process {os.getpid()}" in run.output()
        assert "Set another relay.store, or stop that run" in run.output()
        assert not run.processes()
        assert not run.folder.exists()
        assert not (run.folder.parent / "latest").exists()
    remove_store(default_root(run_id))
