"""Runs read from their folders: running, dead, and with a process id that another process has now."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer
from synthetic_run import START, history
from typer.testing import CliRunner
from waiting import until

from infra.runners.liveness import Liveness, StepBudget
from pipelines.cli.runs import app
from pipelines.inspect.metrics_file import MetricsFile
from pipelines.inspect.run_folders import (
    NoSuchRun,
    find_run,
    find_run_to_resume,
    folder_of,
    laminar_command,
    list_runs,
    read_run,
    run_argument,
    stop_run,
)
from pipelines.present.output import show
from pipelines.roles import liveness_file
from schemas.release import RELEASE, OldRelease

ROLES = {
    "trainer": {"pid": 9, "restarts": 2, "alive": True, "status": "up"},
    "score": {"pid": 8, "restarts": 0, "alive": False, "status": "down"},
}


ENDS = "import signal as s; s.pthread_sigmask(s.SIG_BLOCK, [15]); print('up', flush=True); s.sigwait([15])"
"""A program that exits with 0 on SIGTERM, also on one that comes before it waits."""


def make_run(runs: Path, name: str, **state: Any) -> Path:
    folder = runs / name
    folder.mkdir(parents=True)
    given = {
        "release": RELEASE,
        "run": name,
        "phase": "training",
        "started_at": START / 1000,
        "ended_at": None,
        "error": None,
        **state,
    }
    (folder / "state.json").write_text(json.dumps({"goal": {"optimizer_steps": 100}, "roles": ROLES, **given}))
    return folder


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that exits with 0 on SIGTERM."""
    with subprocess.Popen([sys.executable, "-c", ENDS], stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        started.stdout.readline()
        yield started
        started.kill()


def created(pid: int) -> float:
    return psutil.Process(pid).create_time()


def test_read_run_rejects_run_of_old_release(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "old")
    state = json.loads((folder / "state.json").read_text())
    del state["release"]
    (folder / "state.json").write_text(json.dumps(state))
    for read in (find_run, find_run_to_resume):
        with pytest.raises(OldRelease, match=r"state\.json was written by release 0\.1\.0: use release"):
            read(tmp_path, "old")
    (listed,) = list_runs(tmp_path)
    assert (listed.status, "release 0.1.0" in listed.state["error"]) == ("unreadable", True)


def test_read_run_status(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    pid, at = process.pid, created(process.pid)
    cases = [
        ({"pid": pid, "pid_created": at}, "running"),
        ({"pid": pid}, "running"),
        ({"pid": pid, "pid_created": at - 100}, "died"),  # the process id belongs to another process now
        ({"pid": 2**22 + 5}, "died"),
        ({}, "died"),
        ({"pid": pid, "pid_created": at, "ended_at": 5.0}, "ended"),
        ({"pid": pid, "pid_created": at, "ended_at": 5.0, "error": "no"}, "failed"),
        ({"pid": pid, "pid_created": at, "ended_at": 5.0, "error": "Ctrl-C", "phase": "stopped"}, "stopped"),
    ]
    for number, (state, status) in enumerate(cases):
        assert read_run(make_run(tmp_path, f"run-{number}", **state)).status == status, state


def test_read_run_status_of_zombie_process(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    folder = make_run(tmp_path, "z", pid=process.pid, pid_created=created(process.pid))
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: read_run(folder).status == "died")  # its parent has not waited for it yet


def test_list_runs_newest_first_without_duplicates(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "none") == []
    make_run(tmp_path, "old", started_at=1.0)
    make_run(tmp_path, "new", started_at=3.0)
    make_run(tmp_path, "middle", started_at=2.0)
    (tmp_path / "warm-starts").mkdir()
    (tmp_path / "latest").symlink_to("middle")
    assert [run.run for run in list_runs(tmp_path)] == ["new", "middle", "old"]
    assert find_run(tmp_path, None).folder == tmp_path / "middle"
    assert find_run(tmp_path, "old").started_at == 1.0
    (tmp_path / "latest").unlink()
    assert find_run(tmp_path, None).run == "new"


def test_find_run_names_missing_run(tmp_path: Path) -> None:
    with pytest.raises(NoSuchRun, match="no run yet"):
        find_run(tmp_path, None)
    with pytest.raises(NoSuchRun, match=r"no run 'x' .*state\.json is missing"):
        find_run(tmp_path, "x")
    make_run(tmp_path, "torn")
    with pytest.raises(NoSuchRun, match=r"t0rn/state\.json is missing; did you mean 'torn'\?\)"):
        find_run(tmp_path, "t0rn")
    (tmp_path / "torn" / "state.json").write_text('{"run"')
    with pytest.raises(ValueError, match=r"torn/state\.json is not JSON"):
        find_run(tmp_path, "torn")


def test_runs_are_named_by_path_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "runs", "first")
    (tmp_path / "runs" / "latest").symlink_to("first")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for here, argument in (
        (tmp_path, "first"),
        (elsewhere, str(folder)),
        (tmp_path / "runs", "./first"),
        (folder, str(folder)),
    ):
        monkeypatch.chdir(here)
        assert run_argument(folder) == argument
        assert find_run(Path("runs"), argument).run == "first"
        assert invoke("status", "--run", argument, "--json")[0] == 1  # it died
    monkeypatch.chdir(tmp_path)
    assert folder_of(Path("runs"), None) == Path("runs/first")


def test_laminar_command_includes_path_if_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert laminar_command() == ".venv/bin/laminar"
    monkeypatch.setattr("sys.executable", "/my work/.venv/bin/python")
    assert laminar_command() == "'/my work/.venv/bin/laminar'"
    (tmp_path / "laminar").touch(mode=0o755)
    assert laminar_command() == "laminar"


def test_stop_run_waits_for_end(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    run = read_run(make_run(tmp_path, "a", pid=process.pid, pid_created=created(process.pid)))
    assert stop_run(run, 60)
    assert process.wait(60) == 0
    assert stop_run(run, 0)  # no effect the second time


def test_stop_run_returns_false_at_timeout(tmp_path: Path) -> None:
    code = "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as stubborn:
        assert stubborn.stdout is not None
        stubborn.stdout.readline()
        run = read_run(make_run(tmp_path, "a", pid=stubborn.pid, pid_created=created(stubborn.pid)))
        assert not stop_run(run, 0.3)
        assert stubborn.poll() is None
        stubborn.kill()


@pytest.mark.parametrize(("age_s", "sent"), [(0, [signal.SIGTERM]), (50, [])])
def test_stop_run_spares_process_with_reused_pid(
    tmp_path: Path, process: subprocess.Popen[bytes], age_s: float, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = read_run(make_run(tmp_path, "a", pid=process.pid, pid_created=created(process.pid) - age_s))
    signals = list[int]()
    monkeypatch.setattr(psutil.Process, "send_signal", lambda _, number: signals.append(number))
    assert stop_run(run, 0.0) == (not sent)
    assert signals == sent


def invoke(*arguments: str) -> tuple[int, str]:
    command = typer.Typer(result_callback=lambda result, **options: show(result))
    command.add_typer(app, name="runs")
    result = CliRunner().invoke(command, ["runs", *arguments], catch_exceptions=False)
    return result.exit_code, result.stdout


def test_runs_list_prints_runs(tmp_path: Path) -> None:
    assert invoke("list", "--folder", str(tmp_path)) == (0, f"there are no runs under {tmp_path}/\n")
    make_run(tmp_path, "first", ended_at=START / 1000 + 61, phase="ended")
    make_run(tmp_path, "second", started_at=START / 1000 + 100, pid=2**22 + 5)
    code, out = invoke("list", "--folder", str(tmp_path))
    rows = [line.split() for line in out.splitlines()]
    assert code == 0
    assert rows[1][:3] == ["second", "died", "training"]
    assert rows[2][:3] == ["first", "ended", "ended"]
    assert rows[2][5:7] == ["1:01", "2"]
    code, out = invoke("list", "--folder", str(tmp_path), "--json")
    assert [(each["run"], each["status"]) for each in json.loads(out)] == [("second", "died"), ("first", "ended")]


def test_runs_status_prints_progress(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    folder = make_run(tmp_path, "sums", pid=process.pid, pid_created=created(process.pid))
    with MetricsFile(folder / "metrics.jsonl") as file:
        file.append(metric for metric in history(50) if metric.measured_at < START + 80_000)
    code, out = invoke("status", "--folder", str(tmp_path), "--run", "sums", "--json")
    status = json.loads(out)
    assert code == 0
    assert (status["status"], status["optimizer_steps"], status["progress"]) == ("running", 49, 0.49)
    assert (status["heldout_before"], status["heldout"]) == (0.24, pytest.approx(0.58))
    assert status["lag"]["experiences"] == 3
    code, out = invoke("status", "--folder", str(tmp_path))
    assert code == 0
    rows = ("trainer     up, pid 9, 2 restarts", "score       down", f"supervisor  pid {process.pid}")
    for expected in ("run sums: running, training, 49/100 steps", "0.24 → 0.58", *rows):
        assert expected in out


def test_runs_status_prints_liveness_and_steps(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    roles = {name: {"pid": 9, "restarts": 0, "alive": True, "status": "up"} for name in ("prompts", "score", "trainer")}
    folder = make_run(tmp_path, "slow", pid=process.pid, pid_created=created(process.pid), roles=roles)
    for name, budget_s in (("score", 100.0), ("trainer", 0.0)):
        live = Liveness(clock=iter((10.0, 50.0)).__next__)
        live.set_budget(name, StepBudget(fold_s=budget_s))
        with live.step(name, "fold"):
            file = liveness_file(folder, name)
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(live.report()))
    code, out = invoke("status", "--folder", str(tmp_path))
    assert code == 0
    assert "no liveness report" in next(line for line in out.splitlines() if line.split()[:1] == ["prompts"])
    assert re.search(r"score .*alive \d+ s ago, in fold for 40 of 100 s", out)
    assert re.search(r"trainer .*alive \d+ s ago, STALLED in fold for 40 of 0 s", out)
    found_roles = json.loads(invoke("status", "--folder", str(tmp_path), "--json")[1])["roles"]
    assert found_roles["prompts"]["liveness"] is None
    assert found_roles["trainer"]["liveness"]["steps"]["trainer"]["stalled"] is True
    assert found_roles["score"]["liveness"]["age_s"] < 60


def test_damaged_state_json_affects_only_its_run(tmp_path: Path) -> None:
    make_run(tmp_path, "good", ended_at=5.0)
    for name, text in (("half", '{"run": "ha'), ("list", "[]"), ("binary", "\xff")):
        (make_run(tmp_path, name) / "state.json").write_text(text, encoding="latin-1")
    code, out = invoke("list", "--folder", str(tmp_path), "--json")
    assert code == 0
    listed = {each["run"]: (each["status"], each["error"] or "") for each in json.loads(out)}
    assert listed.pop("good") == ("ended", "")
    for name, (status, error) in listed.items():
        assert status == "unreadable"
        assert f"{name}/state.json" in error
    assert invoke("status", "--folder", str(tmp_path), "--run", "good")[0] == 0
    with pytest.raises(ValueError, match=r"half/state\.json"):
        find_run(tmp_path, "half")
    found = find_run_to_resume(tmp_path, "half")
    assert (found.run, found.status, found.supervised) == ("half", "died", True)


def test_runs_status_of_dead_run_exits_with_1(tmp_path: Path) -> None:
    make_run(tmp_path, "dead", pid=2**22 + 5)
    code, out = invoke("status", "--folder", str(tmp_path))
    assert code == 1
    assert "runs resume" not in out, "it ended before its topics were created"
    (tmp_path / "dead" / "config.toml").touch()
    code, out = invoke("status", "--folder", str(tmp_path))
    assert code == 1
    assert f"laminar runs resume --run {tmp_path / 'dead'}\n" in out
    assert "run dead: died in phase training" in out
    make_run(tmp_path, "failed", ended_at=START / 1000 + 9, error="the disk is full", phase="failed")
    code, out = invoke("status", "--folder", str(tmp_path), "--run", "failed")
    assert code == 1
    assert "the disk is full" in out


def test_runs_stop_prints_result(tmp_path: Path) -> None:
    make_run(tmp_path, "over", ended_at=5.0)
    code, out = invoke("stop", "--folder", str(tmp_path))
    assert (code, out) == (0, "run over is not running: its status is ended\n")
    with subprocess.Popen([sys.executable, "-c", ENDS], stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        started.stdout.readline()
        make_run(tmp_path, "on", pid=started.pid, pid_created=created(started.pid), started_at=START / 1000 + 1)
        assert invoke("stop", "--folder", str(tmp_path), "--run", "on") == (0, "run on stopped\n")
