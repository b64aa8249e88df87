"""Detached submissions: resubmitted after a lost job, resumed after a restart of the machine, and stopped."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from record_samples import SAMPLES, TRAJECTORY
from role_writer import write_as_role

from infra.kafka.broker import Broker
from infra.kafka.topic_reader import read_rows
from infra.processes import is_running
from infra.store.names import default_root
from infra.store.ownership import remove_store
from pipelines.cli import stop as stopping
from pipelines.cli.local_runs import _cells, to_json
from pipelines.cli.main import main
from pipelines.config import load_config
from pipelines.inspect.audit.audit_run import audit as audit_run
from pipelines.inspect.audit.result import Audit, ReachedStage
from pipelines.inspect.run_files import AUDIT_FILE, AUDIT_SO_FAR_FILE, FIRST_SUBMITTED
from pipelines.inspect.run_folders import newest_audit, read_run, run_command
from pipelines.inspect.submissions import Submission, read_submission, submissions
from pipelines.run import drain as draining
from pipelines.run.topics import make_topics
from schemas.records import Experience, PolicyVersion, WeightVersion
from schemas.topics import EXPERIENCES, RELAY, TRAJECTORIES, partition_of

pytestmark = pytest.mark.usefixtures("killed_programs")

Laminar = Callable[..., tuple[int, Any]]
MANIFEST = next(each for each in SAMPLES.values() if isinstance(each, WeightVersion))


@pytest.fixture
def runs(tmp_path: Path, run_id: str) -> Iterator[Path]:
    yield tmp_path / "runs"
    for each in submissions(next(iter((tmp_path / "runs").glob("*")), tmp_path)):
        if (process := each.respawner()) is not None:
            for child in [*process.children(recursive=True), process]:
                child.kill()
                child.wait(30)
    remove_store(default_root(run_id))


@pytest.fixture
def laminar(runs: Path, capsys: pytest.CaptureFixture[str]) -> Laminar:
    def call(*arguments: str) -> tuple[int, Any]:
        with pytest.raises(SystemExit) as exit_info:
            main([*arguments, "--json", *(["--folder", str(runs)] if arguments[0] == "runs" else [])])
        out = capsys.readouterr().out
        lines = json.loads(out) if "logs" in arguments else None
        return int(exit_info.value.code or 0), lines or (json.loads(out) if out else None)

    return call


def wait_until(condition: Callable[[], Any], message: str, seconds: float = 120.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, message
        time.sleep(0.05)
    return found


@pytest.mark.slow
def test_respawner_resubmits_a_lost_job_and_resumes(
    broker: Broker,
    run_id: str,
    runs: Path,
    tmp_path: Path,
    laminar: Laminar,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'rollout.engine = "emulated"\nprompts.source = "synthetic"\n'
        f'[run]\nname = "{run_id}"\nfolder = "{runs}"\n[kafka]\nbootstrap_servers = "{broker.bootstrap_servers}"\n'
    )
    submit = ("submit", "score", str(file), "--detach")
    make_topics(load_config(file))
    last = replace(MANIFEST, version=PolicyVersion(1, 80), final=True)
    write_as_role(broker.client(), run_id, RELAY, [last])
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    code, submitted = laminar(*submit)
    assert code == 0
    log = Path(submitted["log"])
    assert submitted["trained_steps"] == 80
    assert laminar(*submit)[0] == 1  # it has a respawner already
    respawner_process = psutil.Process(submitted["respawner"])

    def started(number: int) -> None:
        wait_until(lambda: f"start {number} of" in log.read_text(), f"start {number}:\n{log.read_text()}")

    def job(respawner: int = submitted["respawner"]) -> psutil.Process:
        children = psutil.Process(respawner).children
        return wait_until(lambda: [each for each in children() if each.is_running()], "a job")[0]  # type: ignore[no-any-return]

    started(1)
    os.kill(job().pid, signal.SIGKILL)  # the job is lost
    started(2)
    (row,) = [row for row in laminar("runs", "list")[1] if row["run"] == run_id]
    assert (row["status"], row["roles"]["score"]["restarts"]) == ("running", 1)
    assert row["roles"]["score"]["last_error"] == f"was killed by SIGKILL (see {log})"
    orphan = job()
    respawner_process.kill()
    respawner_process.wait(10)
    code, status = laminar("runs", "status", "--run", run_id)
    role = status["roles"]["score"]
    assert (code, status["status"], role["status"]) == (0, "running", "unsupervised")
    assert (role["pid"], role["respawner"], role["liveness"]["pid"]) == (orphan.pid, None, orphan.pid)
    code, resumed = laminar("runs", "resume", "--run", run_id)
    assert (code, list(resumed["resumed"])) == (0, ["score"])
    started(3)
    assert not is_running(orphan)  # it has drained, and its successor has started then
    successor = resumed["resumed"]["score"]
    for process in (psutil.Process(successor), job(successor)):
        process.kill()  # as in a restart of the machine
        wait_until(lambda p=process: not is_running(p), "its end")  # type: ignore[misc]
    code, status = laminar("runs", "status", "--run", run_id)
    assert (code, status["status"], status["roles"]["score"]["status"]) == (1, "died", "died")
    assert laminar("runs", "resume", "--run", run_id)[0] == 0
    started(4)
    lines_logged = laminar("runs", "logs", "score", "--run", run_id, "-n", "2")[1]
    assert [line["role"] for line in lines_logged] == ["score", "score"]
    respawner = submissions(runs / run_id)[0].respawner()
    assert respawner is not None
    respawner.kill()
    respawner.wait(10)
    assert len(list(temporary.iterdir())) == 1
    code, stopped = laminar("runs", "stop", "--run", run_id)
    assert (code, stopped["stopped"], stopped["status"]) == (0, True, "ended")
    assert stopped["started_at"] < stopped["ended_at"] <= time.time()
    assert 0 < stopped["downtime_s"] < stopped["ended_at"] - stopped["started_at"]  # between the kill and the resume
    (row,) = [row for row in laminar("runs", "list")[1] if row["run"] == run_id]
    assert (row["ended_at"], row["downtime_s"]) == (stopped["ended_at"], stopped["downtime_s"])
    assert _cells(row)["duration"] is not None
    assert newest_audit(runs / run_id) is None  # the machine of the trainer audits the run
    assert not submissions(runs / run_id)[0].respawner()
    assert list(temporary.iterdir()) == [], "temporary files of killed respawners are removed"
    assert "Traceback" not in log.read_text().partition("start 4 of")[2]


@pytest.mark.slow
def test_submitted_trainer_is_audited_changed_and_drained(
    broker: Broker, run_id: str, runs: Path, tmp_path: Path, laminar: Laminar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "CHECK_EVERY_S", 0.05)
    monkeypatch.setattr(stopping, "KAFKA_TIMEOUT_S", 60.0)  # else a run is not audited at its stop
    file = tmp_path / "run.toml"
    file.write_text(
        'rollout.engine = "emulated"\nprompts.source = "synthetic"\n'
        f'[run]\nname = "{run_id}"\nfolder = "{runs}"\naudit_every_s = 8\n'
        f'[kafka]\nbootstrap_servers = "{broker.bootstrap_servers}"\n'
    )
    assert laminar("submit", "trainer", str(file), "--detach")[0] == 0
    audit, final = runs / run_id / AUDIT_SO_FAR_FILE, runs / run_id / AUDIT_FILE
    wait_until(audit.exists, "an audit")
    assert laminar("runs", "status", "--run", run_id)[1]["audit"]["passed"]
    (before,) = submissions(runs / run_id)
    wait_until(lambda: "start 1 of" in before.log.read_text(), "its start")
    resume = ("runs", "resume", "--run", run_id)
    assert laminar(*resume, "--set", "trainer.learner.learning_rate=0.5")[0] == 1
    assert submissions(runs / run_id) == [before]
    code, changed = laminar(*resume, "--set", "trainer.optimizer_steps=90")
    assert (code, list(changed["resumed"]), changed["running"]) == (0, ["trainer"], [])
    (after,) = submissions(runs / run_id)
    assert (before.respawner(), after.pid) == (None, changed["resumed"]["trainer"])
    assert load_config(after.config).trainer.optimizer_steps == 90
    wait_until(lambda: "start 2 of" in after.log.read_text(), "its start with the new setting")
    code, drained = laminar("runs", "drain", "--run", run_id)
    assert (code, drained["drained"], drained["audit"]["passed"]) == (0, True, True)
    assert json.loads(final.read_text())["passed"]
    final.write_text(json.dumps(Audit(dispatched=3, lost=(ReachedStage("p1.0", "score"),)).to_json()))
    assert not laminar("runs", "status", "--run", run_id)[1]["audit"]["passed"]  # the last word on the run
    assert laminar(*resume)[1]["resumed"]
    assert not final.exists()
    stop = ("runs", "stop", "--run", run_id)
    assert laminar(*stop)[0] == 0
    assert not final.exists()  # it may be resumed
    last = replace(MANIFEST, version=PolicyVersion(9, 90), final=True)
    write_as_role(broker.client(), run_id, RELAY, [last])
    assert laminar(*stop)[0] == 0  # also if it has ended by itself
    assert json.loads(final.read_text())["passed"]


@pytest.mark.slow
def test_submitted_score_takes_another_number_of_shards(
    broker: Broker, run_id: str, runs: Path, tmp_path: Path, laminar: Laminar
) -> None:
    """Trajectories finish before, during and after the change; each is scored once."""
    file, client = tmp_path / "run.toml", broker.client()
    file.write_text(
        'rollout.engine = "emulated"\nprompts.source = "synthetic"\n'
        f'[run]\nname = "{run_id}"\nfolder = "{runs}"\n'
        f'[kafka]\nbootstrap_servers = "{broker.bootstrap_servers}"\npartitions = 4\n[score]\nshards = 2\n'
        'answer = "whole"\nrewards = [{ name = "length", options = { target = 10, limit = 200 } }]\n'
    )
    make_topics(load_config(file))
    finished: list[str] = []

    def finish(prompts: range) -> None:
        for number in prompts:
            asked = replace(TRAJECTORY.prompt, number=number, samples=2, environment="")
            plain = replace(TRAJECTORY, prompt=asked, episode=None, conversations=(), conversation_rewards=())
            group = [replace(plain, member=member) for member in range(2)]
            write_as_role(client, run_id, TRAJECTORIES, group, partition=partition_of(number, 4))
            finished.extend(each.trajectory_id for each in group)

    def scored() -> list[str]:
        rows = read_rows(client, EXPERIENCES.name(run_id), Experience)
        return sorted(row.trajectory.trajectory_id for row in rows)

    code, submitted = laminar("submit", "score", str(file), "--detach")
    assert code == 0
    log = Path(submitted["log"])
    finish(range(8))
    wait_until(lambda: len(scored()) >= len(finished), "the first experiences")
    finish(range(8, 12))
    code, changed = laminar("runs", "resume", "--run", run_id, "--set", "score.shards=3")
    assert (code, list(changed["resumed"]), changed["running"]) == (0, ["score"], [])
    finish(range(12, 20))
    wait_until(lambda: len(scored()) >= len(finished), "all experiences")
    assert "score has 3 shards from here on; it had 2" in log.read_text()
    assert laminar("runs", "stop", "--run", run_id)[0] == 0
    assert scored() == sorted(finished)
    found = audit_run(client, run_id)
    assert found.passed, found
    assert found.in_flight == {"experience": len(finished)}


def test_read_submission_names_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "score.json").write_text("{")
    with pytest.raises(ValueError, match=r"score\.json is damaged"):
        read_submission(tmp_path / "score.json")


def test_submitted_run_has_started_at_its_first_submission(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "submitted").mkdir(parents=True)
    role = Submission(folder, "score", 0, "embedded", pid=1, pid_created=time.time())
    role.write()
    first = read_run(folder).started_at
    replace(role, pid=2, pid_created=first + 1000).write()
    assert read_run(folder).started_at == first
    replace(role, pid=None, state="ended", ended_at=first + 60, down_s=20.0).write()
    assert _cells(to_json(read_run(folder)))["duration"] == "0:40"
    replace(role, pid=2, pid_created=first + 1000).write()
    (folder / FIRST_SUBMITTED).unlink()  # of an earlier release
    assert read_run(folder).started_at == first + 1000


def test_submit_refuses_a_submitted_role_before_it_loads_kafka(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, me = tmp_path / "run.toml", psutil.Process()
    file.write_text(
        'rollout.engine = "emulated"\nprompts.source = "synthetic"\nkafka.bootstrap_servers = "127.0.0.1:1"\n'
        f'[run]\nname = "twice"\nfolder = "{tmp_path}"\n'
    )
    folder = tmp_path / "twice"
    (folder / "submitted").mkdir(parents=True)
    Submission(folder, "score", 0, "embedded", pid=me.pid, pid_created=me.create_time()).write()
    monkeypatch.setitem(sys.modules, "pipelines.run.submission.guard", None)  # its import would fail
    for options in ([], ["--detach"]):
        with pytest.raises(SystemExit) as exit_info:
            main(["submit", "score", str(file), *options])
        assert exit_info.value.code == 1
        assert capsys.readouterr().err == (
            f"laminar: score of run twice is submitted already; its respawner is process {me.pid}: "
            f"`{run_command(folder, 'runs status')}` shows it, "
            f"`{run_command(folder, 'runs stop --role score')}` ends it\n"
        )
