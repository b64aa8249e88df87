"""Roles of `submit --detach`: their two processes, resuming them, ending one for good, and the store that is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import until

from infra.runners.flink_jobs import CANCEL_S
from infra.store.names import default_root
from infra.store.ownership import open_folder
from pipelines.cli.main import main
from pipelines.config import Config, ConfigDraft, ConfigError, load_config, parse_config, save_config
from pipelines.inspect.run_folders import read_run
from pipelines.inspect.submissions import Submission, read_submission, submissions
from pipelines.roles import Role, submitted_process
from pipelines.run.inputs import record_inputs
from pipelines.run.paths import with_absolute_paths
from pipelines.run.submission import guard, role_checks
from pipelines.run.submission.detached import (
    AlreadySubmitted,
    _refuse_in_foreground,
    _socket_prefix,
    in_foreground,
    start_respawner,
)
from pipelines.run.submission.respawner import last_error
from pipelines.run.submission.role_checks import sections_of

pytestmark = pytest.mark.usefixtures("killed_programs")

Start = Callable[[], tuple[int, float]]
Laminar = Callable[..., tuple[int, str, str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process that ends on SIGTERM; returns its id and its start."""
    with ExitStack() as stack:

        def call() -> tuple[int, float]:
            process = stack.enter_context(subprocess.Popen(["sleep", "600"]))
            stack.callback(process.kill)
            return process.pid, psutil.Process(process.pid).create_time()

        yield call


@pytest.fixture
def folder(tmp_path: Path, run_id: str) -> Path:
    return tmp_path / "runs" / run_id


@pytest.fixture
def laminar(folder: Path, capsys: pytest.CaptureFixture[str]) -> Laminar:
    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["runs", *words, "--run", folder.name, "--folder", str(folder.parent)])
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, " ".join(printed.err.replace("│", " ").split())

    return call


def submitted(folder: Path, pipeline: str, model: str = "/nowhere", index: int = 0, **fields: Any) -> Submission:
    """A role that was submitted, with its files."""
    submission = Submission(folder, pipeline, index, "embedded", **fields)
    submission.file.parent.mkdir(parents=True, exist_ok=True)
    submission.write()
    table = {"run": {"name": folder.name, "folder": str(folder.parent)}, "model": {"path": model}}
    kafka = {"bootstrap_servers": "127.0.0.1:9", "partitions": 2}
    save_config(parse_config({**table, "kafka": kafka}, "a test"), submission.config)
    return submission


def make_model(folder: Path) -> None:
    """Make the files of a model, without content."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")


def test_refuse_in_foreground_trusts_names_of_own_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any user can bind any name, and names need not be UTF-8."""
    client = parse_config({"run": {"name": folder.name}, "kafka": {"client_properties": "my.properties"}}, "a test")
    placement, prefix = submitted(folder, "placement"), _socket_prefix(with_absolute_paths(client))
    (ended := subprocess.Popen(["true"])).wait()
    names = ["", "x", "placement/0", "placement/0/x", "placement/0/1/2", f"placement/0/{ended.pid}"]
    with ExitStack() as stack:
        for name in (b"\xff", *(f"{prefix}{name}".encode() for name in names)):
            stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)).bind(b"\0" + name)
        _refuse_in_foreground(with_absolute_paths(client), placement)
        with in_foreground(client, [placement.role]):  # with its relative path
            with pytest.raises(AlreadySubmitted, match=f"runs in the foreground, as process {os.getpid()}: "):
                _refuse_in_foreground(with_absolute_paths(client), placement)
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
            _refuse_in_foreground(with_absolute_paths(client), placement)


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def kill(pid: int) -> None:
    psutil.Process(pid).kill()
    deadline = time.monotonic() + 30
    while not has_ended(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_submission_is_unsupervised_while_only_its_process_works(folder: Path, start: Start) -> None:
    respawner, worker = start(), start()
    processes = {"pid": respawner[0], "pid_created": respawner[1], "worker": worker[0], "worker_created": worker[1]}
    submission = submitted(folder, "score", **processes)
    assert submission.status == "up"
    assert read_run(folder).state["phase"] == "starting"
    alive = folder / "alive" / "score.json"
    alive.parent.mkdir()
    alive.write_text('{"ready": true}')
    assert read_run(folder).state["phase"] == "training"
    role = read_run(folder).state["roles"]["score"]
    assert (role["pid"], role["respawner"]) == (worker[0], respawner[0])
    kill(respawner[0])
    assert submission.status == "unsupervised"
    found = read_run(folder)
    assert (found.status, found.state["roles"]["score"]["pid"], found.state["roles"]["score"]["respawner"]) == (
        "running",
        worker[0],
        None,
    )
    kill(worker[0])
    assert submission.status == "died"
    found = read_run(folder)
    assert (found.status, found.state["phase"]) == ("died", "died")


def test_respawner_stops_the_process_of_a_killed_respawner(folder: Path, start: Start) -> None:
    pid, created = start()
    respawner = start_respawner(submitted(folder, "trainer", worker=pid, worker_created=created))
    deadline = time.monotonic() + 120
    while (now := read_submission(respawner.file)).state == "up":
        assert time.monotonic() < deadline, respawner.log.read_text()
        time.sleep(0.05)
    assert has_ended(pid)
    assert f"process {pid}, whose respawner has ended, is stopped" in respawner.log.read_text()
    assert (now.state, now.restarts) == ("failed", 0)
    assert now.error == f"it cannot run: model.path: there is no folder /nowhere (see {respawner.log})"
    assert read_run(folder).state["error"] == f"trainer: {now.error}"


def test_last_error_is_of_the_last_start(tmp_path: Path) -> None:
    log = tmp_path / "score.log"
    log.write_text("laminar: no disk\n")
    begin = log.stat().st_size
    with log.open("a") as file:
        file.write("Traceback\nKeyError: 'a'\n")
    assert last_error(log, begin) == "KeyError: 'a'"
    assert last_error(log) == "no disk"


def test_resume_changes_a_setting_of_the_roles_that_read_it(
    folder: Path, laminar: Laminar, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def start_respawner(submission: Submission) -> Submission:
        started.append(submission.role.name)
        return submission

    monkeypatch.setattr("pipelines.run.submission.detached.start_respawner", start_respawner)
    make_model(folder)
    pids = {}
    for pipeline in ("placement", "trainer", "score", "rollout"):
        pids[pipeline], created = start()
        submitted(folder, pipeline, model=str(folder), pid=pids[pipeline], pid_created=created)
    submitted(folder, "prompts", model=str(folder))  # has ended
    goal = ("resume", "--set", "trainer.optimizer_steps=90")
    with in_foreground(load_config(folder / "submitted" / "trainer.toml"), [Role("prompts")]):
        code, _, error = laminar(*goal)
    assert f"prompts of run {folder.name} runs in the foreground, as process {os.getpid()}, and reads " in error
    assert (code, has_ended(pids["trainer"])) == (1, False)
    for change, reason in (
        ("rollout.slots=4", "rollout.slots cannot change in a resumed run"),
        ("score.shards=2", "score.shards cannot change, as shards were submitted one by one (score)"),
        ("trainer.optimizer_steps=3", "is less than the run's goal of 80 steps"),
    ):
        code, _, error = laminar("resume", "--set", change)
        assert (code, reason in error) == (1, True), error
    for kept in ("model", "model-80"):  # an extension was interrupted, and the trainer has written the model again
        (folder / kept).mkdir()
        (folder / kept / "config.json").touch()
    code, text, _ = laminar(*goal)
    assert code == 0
    assert "changed trainer.optimizer_steps of run" in text
    assert f"submitted again: placement, trainer; resumed run {folder.name}: prompts" in text
    assert started == ["prompts", "placement", "trainer"]
    assert {name for name, pid in pids.items() if has_ended(pid)} == {"placement", "trainer"}
    assert {load_config(each.config).trainer.optimizer_steps for each in submissions(folder)} == {90}
    assert (folder / "model-80" / "config.json").exists()  # its model so far
    assert not (folder / "model").exists()
    os.kill(pids["rollout"], signal.SIGSTOP)  # it is slow to end
    until(lambda: psutil.Process(pids["rollout"]).status() == psutil.STATUS_STOPPED)
    code, text, error = laminar("resume", "--accept-changes", "--set", "rollout.step_timeout_s=99", "--timeout", "0")
    assert (code, "still ending: rollout-0 (`" in text) == (1, True), error
    os.kill(pids["rollout"], signal.SIGCONT)


def test_resume_names_ranks_that_its_new_number_lacks(folder: Path, laminar: Laminar) -> None:
    roles = [submitted(folder, "trainer", index=index) for index in range(2)]
    for role in roles:
        save_config(load_config(role.config, ["trainer.ranks=2"]), role.config)
    change = ("resume", "--set", "trainer.ranks=1", "--set", "trainer.batch_shares=2")
    code, _, error = laminar(*change)
    assert code == 1
    assert "trainer-1 does not exist with trainer.ranks = 1: end it with `laminar runs stop --role trainer-1`" in error
    replace(roles[1], state="removed").write()
    code, _, error = laminar(*change)
    assert "/nowhere" in error  # the model of this test: the change itself is accepted


def test_resume_changes_no_settings_of_roles_in_the_foreground(folder: Path, laminar: Laminar) -> None:
    submitted(folder, "score").file.unlink()
    code, _, error = laminar("resume", "--set", "score.shards=2")
    assert code == 2
    assert f"no role of run {folder.name} was submitted with --detach: end each that reads" in error


def test_resume_starts_no_role_if_one_cannot_run(folder: Path, laminar: Laminar, tmp_path: Path) -> None:
    roles = [submitted(folder, pipeline) for pipeline in ("trainer", "rollout", "placement")]
    code, _, error = laminar("resume")
    assert code == 1
    files = ", ".join(str(each.config) for each in (roles[1], roles[0]))
    assert error == f"laminar: model.path: there is no folder /nowhere (in {files})"
    assert all(read_submission(each.file).pid is None for each in roles)


def test_resume_refuses_a_role_whose_files_have_changed(folder: Path, laminar: Laminar, tmp_path: Path) -> None:
    settings = tmp_path / "model" / "config.json"
    settings.parent.mkdir()
    settings.write_text("{}")
    for pipeline in ("trainer", "placement"):
        role = submitted(folder, pipeline, model=str(settings.parent))
        record_inputs(load_config(role.config), role.inputs, sections_of(load_config(role.config), role))
    settings.write_text('{"hidden_size": 8}')
    code, _, error = laminar("resume")
    assert code == 1
    assert "1 of the files that the run reads are not as they were at its start" in error
    assert error.endswith(f"--accept-changes` {settings} has changed")
    assert read_submission(role.file).pid is None


def test_stopped_role_is_not_resumed_with_its_run(folder: Path, laminar: Laminar, start: Start) -> None:
    processes = [start(), start()]
    for index, (pid, created) in enumerate(processes):
        submitted(folder, "rollout", index=index, pid=pid, pid_created=created)
    code, text, _ = laminar("stop", "--role", "rollout-1")
    assert (code, text) == (0, f"rollout-1 of run {folder.name} has ended, and is not resumed with the run\n")
    assert [has_ended(pid) for pid, _ in processes] == [False, True]
    assert [each.status for each in submissions(folder)] == ["up", "removed"]
    code, text, _ = laminar("resume")
    assert code == 0
    assert "ended for good: rollout-1" in text
    assert [each.status for each in submissions(folder)] == ["up", "removed"]
    code, _, error = laminar("stop", "--role", "rollout-7")
    assert code == 2
    assert "there are: rollout-0, rollout-1" in error


@pytest.mark.parametrize(("runner", "more_s"), [("embedded", 0.0), ("flink", CANCEL_S)])
def test_commands_wait_for_the_end_of_a_job_on_flink(
    folder: Path, laminar: Laminar, monkeypatch: pytest.MonkeyPatch, runner: str, more_s: float
) -> None:
    waits = []

    def stop(submission: Submission, deadline: float) -> bool:
        waits.append(deadline - time.monotonic())
        return True

    for module in ("change", "detached"):
        monkeypatch.setattr(f"pipelines.run.submission.{module}.stop", stop)
    monkeypatch.setattr("pipelines.run.submission.detached.start_respawner", lambda submission: submission)
    replace(submitted(folder, "score"), runner=runner).write()
    submitted(folder, "placement")
    for words, expected in (
        (("resume", "--set", "run.stop_error_window=99"), 120 + more_s),
        (("stop",), 60 + more_s),
        (("stop", "--role", "score"), 60 + more_s),
        (("stop", "--role", "placement"), 60),
        (("stop", "--timeout", "7"), 7),
    ):
        waits.clear()
        code, _, error = laminar(*words)
        assert (code, waits != []) == (0, True), error
        assert waits == pytest.approx([expected] * len(waits), abs=30)


def test_stop_removes_the_store_of_a_run_unless_it_is_in_use(folder: Path, laminar: Laminar, start: Start) -> None:
    pid, created = start()
    submitted(folder, "trainer", pid=pid, pid_created=created)
    store = default_root(folder.name)
    lock = open_folder(store, folder)
    try:
        code, text, _ = laminar("stop", "--json")
        assert (code, json.loads(text)["stopped"], store.is_dir()) == (0, True, True)
        assert f"its weight store stays: {store} is in use by" in " ".join(laminar("stop")[1].split())
    finally:
        lock.release()
    assert f"its weight store {store} is removed" in " ".join(laminar("stop")[1].split())
    assert not store.exists()


def on_gpus(folder: Path, model: Path, **trainer: Any) -> Config:
    """A run with the trainer on GPUs, and `model`."""
    make_model(model)
    table = {"run": {"name": folder.name}, "trainer": {"device": "cuda", **trainer}, "model": {"path": str(model)}}
    return parse_config({**table, "kafka": {"bootstrap_servers": "127.0.0.1:9"}}, "a test")


def test_submitted_trainer_refuses_the_gpus_of_a_rollout(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    config = on_gpus(folder, tmp_path)
    monkeypatch.setattr(guard, "visible_gpus", lambda: ("0", "1"))
    name = f"{_socket_prefix(config)}rollout/0/{start()[0]}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as held:
        held.bind(f"\0{name}")
        with pytest.raises(ConfigError, match="trainer and rollout-0, which runs on this machine, share GPU 0"):
            guard.prepare(ConfigDraft(config), submitted_process(config, "trainer", 0), lambda line: None)


def test_submission_refuses_a_gpu_that_is_absent(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = on_gpus(folder, tmp_path, gpus=[2])
    for module in (guard, role_checks):
        monkeypatch.setattr(module, "visible_gpus", lambda: ("0", "1"))
    monkeypatch.setattr(role_checks, "existing_topics", lambda config: ({}, []))
    says = "the trainer uses GPU 2, but this machine has 2 GPUs, numbered from 0"
    with pytest.raises(ConfigError, match=says):
        guard.prepare(ConfigDraft(config), submitted_process(config, "trainer", 0), lambda line: None)
    submission = Submission(folder, "trainer", 0, "embedded")
    assert list(role_checks.place_problems(config, submission)) == [says]


@pytest.mark.parametrize("pipeline", ["trainer", "rollout"])
def test_submission_refuses_a_model_without_weights(folder: Path, tmp_path: Path, pipeline: str) -> None:
    config = on_gpus(folder, tmp_path)
    assert list(role_checks.role_problems(config, Role(pipeline))) == []
    (tmp_path / "model.safetensors").unlink()
    (problem,) = role_checks.role_problems(config, Role(pipeline))
    assert problem.startswith(f"model.path: {tmp_path} has no weights (none of model.safetensors")


@pytest.mark.parametrize(
    ("host", "address", "rank", "ranks", "refused"),
    [
        ("node-0", "127.0.1.1", 0, 2, True),
        ("node-0", "127.0.1.1", 1, 2, False),
        ("node-0", "127.0.1.1", 0, 1, False),
        ("node-0", "10.0.0.5", 0, 2, False),
        ("localhost", "127.0.0.1", 0, 2, False),
        ("127.0.1.1", "127.0.1.1", 0, 2, False),
        ("node-0", None, 0, 2, False),
    ],
)
def test_submission_refuses_a_name_of_rank_0_that_is_loopback(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    address: str,
    rank: int,
    ranks: int,
    refused: bool,
) -> None:
    def resolved(name: str) -> str:
        if address is None:
            raise socket.gaierror("Name or service not known")
        return address

    monkeypatch.setattr(role_checks, "resolved_address", resolved)
    config = on_gpus(folder, tmp_path, ranks=ranks, rank_0_host=host)
    problems = list(role_checks.role_problems(config, Role("trainer", rank)))
    assert len(problems) == refused
    assert all("trainer.rank_0_host: node-0 is 127.0.1.1 on this machine" in each for each in problems)
