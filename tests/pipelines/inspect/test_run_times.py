"""The times of a run that was stopped or killed, and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelines.inspect.run_folders import RunFolder, read_run
from pipelines.inspect.run_state.local_run import in_phase, started_run, stopped_run
from pipelines.inspect.run_state.state import fold_all
from pipelines.inspect.run_times import NOT_RUNNING, phases_at_resume
from pipelines.present.report.closing import closing_lines
from pipelines.present.report.summary import summarise
from pipelines.present.view.text import run_line
from pipelines.run.state import RunStateFile
from schemas.records import Metric

KILLED = {"started_at": 1000.0, "ended_at": None, "phase": "training", "phases": {"starting": 60.0, "broker": 15.0}}


def test_killed_run_has_its_last_phase_and_the_downtime() -> None:
    phases = phases_at_resume(KILLED, alive_at=1400.0, now=1460.0)
    assert phases == {"starting": 60.0, "broker": 15.0, "training": 325.0, NOT_RUNNING: 60.0}
    again = phases_at_resume({**KILLED, "phases": phases, "phase": "training"}, alive_at=1500.0, now=1510.0)
    assert again == {**phases, "training": 365.0, NOT_RUNNING: 70.0}


def test_stopped_run_has_the_time_since_its_end_as_downtime() -> None:
    phases = {"starting": 60.0, "training": 40.0}
    stopped = {"started_at": 1000.0, "ended_at": 1100.0, "phase": "stopped", "phases": phases}
    assert phases_at_resume(stopped, alive_at=1100.0, now=1300.0) == {**phases, NOT_RUNNING: 200.0}


@pytest.mark.parametrize("ended_at", [1399.0, None], ids=["stopped", "killed"])
def test_all_times_of_a_resumed_run_agree(ended_at: float | None, tmp_path: Path) -> None:
    before = {**KILLED, "ended_at": ended_at}
    if ended_at:
        before["phases"] = {"starting": 60.0, "broker": 15.0, "training": 324.0}
    resumed = RunStateFile(tmp_path, "r", 8, phases=phases_at_resume(before, 1400.0, 1460.0), started_at=1000.0)
    resumed.end()
    path = tmp_path / "state.json"
    state = json.loads(path.read_text())
    state["phases"]["starting"] = 60.0  # without the time that this test has taken so far
    state["ended_at"] = state["started_at"] + sum(state["phases"].values())
    path.write_text(json.dumps(state))
    summary = summarise(tmp_path, None, state["phases"])
    down = 61.0 if ended_at else 60.0
    assert summary["downtime_seconds"] == down
    assert summary["wall_seconds"] == pytest.approx(sum(state["phases"].values()) - down)
    assert f"(and {'1:01' if ended_at else '1:00'} not running)" in closing_lines(tmp_path, summary)
    run = read_run(tmp_path)
    newest = Metric("trainer", 8, {}, 9_000_000)
    ended = stopped_run(fold_all(started_run(run), [newest]), run)
    assert ended.elapsed_s == pytest.approx(summary["wall_seconds"], abs=0.01)
    assert run_line(ended).startswith("[6:4" if ended_at is None else "[6:3")


def test_running_run_is_in_its_phase_since_the_previous_one(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, KILLED, "running")
    state = in_phase(started_run(run), run)
    assert (state.phase, state.phases[-1].at) == ("training", 1_075_000)


def test_killed_run_ends_at_its_newest_metric(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, KILLED, "died")
    state = fold_all(started_run(run), [Metric("trainer", 1, {}, 1_400_000)])
    assert stopped_run(state, run).elapsed_s == 400.0
