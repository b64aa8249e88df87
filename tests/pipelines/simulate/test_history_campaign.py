"""The campaign of histories: it continues with the same code alone, and keeps every failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "soak"))

import simulated_histories

from infra.simulation import scheduler
from operators.score.score_trajectories import _Scoring
from pipelines.simulate import explore
from pipelines.simulate.configurations import SHAPES
from pipelines.simulate.simulated_role import ShardProcess
from pipelines.simulate.world import SimulatedHistory, World


def campaign(monkeypatch: pytest.MonkeyPatch, folder: Path, count: int, code: str) -> int:
    arguments = ["simulated_histories.py", "--folder", str(folder), "--count", str(count), "--jobs", "2"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(simulated_histories, "simulated_code", lambda: code)
    return simulated_histories.main()


def test_campaign_keeps_failures_and_forgets_those_of_other_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(self: World) -> SimulatedHistory:
        if self.history.seed == 1:
            raise ZeroDivisionError("a defect of the simulation")
        self.history.digest = "played"
        return self.history

    monkeypatch.setattr(World, "run", run)
    monkeypatch.setattr("pipelines.simulate.hosts.SHARED_MEMORY", tmp_path / "shared memory")
    (tmp_path / "shared memory").mkdir()
    assert campaign(monkeypatch, tmp_path, 2, "a") == 1
    assert campaign(monkeypatch, tmp_path, 3, "a") == 1, "the failure of this code is kept"
    reason = "the simulation ended with ZeroDivisionError in run: a defect of the simulation"
    assert json.loads((tmp_path / "failing-1.json").read_text())["failure"] == reason
    output = capsys.readouterr().out
    assert f"seed 1: {reason}" in output
    assert "an hour with 2 processes" in output
    assert not list((tmp_path / "shared memory").iterdir())
    monkeypatch.setattr(World, "run", lambda self: self.history)
    assert campaign(monkeypatch, tmp_path, 2, "b") == 0
    assert json.loads((tmp_path / "histories.json").read_text())["seeds"] == 2


def test_campaign_depends_on_the_code_that_histories_run() -> None:
    code = (
        "import simulated_histories as campaign; campaign.SHAPES = ['plain']; campaign.simulated_code();"
        "print(*(file.relative_to(campaign.ROOT) for file in campaign.loaded_code()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(simulated_histories.__file__).parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    files = done.stdout.split()
    assert {"operators/io/ledger.py", "infra/simulation/cluster.py"} <= set(files)
    assert not [file for file in files if file.startswith(("pipelines/present/", "pipelines/cli/", "pipelines/run/"))]


@pytest.mark.parametrize("failing", ["campaign.py", "nothing"])
def test_make_soak_runs_all_campaigns_after_a_failure(tmp_path: Path, failing: str) -> None:
    for name in ("python", "pytest"):
        (tmp_path / name).write_text(f'#!/bin/sh\ncase "$*" in *"/{failing} "*) exit 1;; esac\n')
        (tmp_path / name).chmod(0o755)
    ready = tmp_path / "ready"
    ready.touch()
    command = ["make", "soak", f"BIN={tmp_path}", f"READY={ready}"]
    made = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert (made.returncode != 0) == (failing == "campaign.py")
    assert ("failed: [" in made.stderr) == (failing == "campaign.py")
    order = [made.stdout.index(each) for each in ("campaign.py", "simulated_histories.py", "simulated_mutations.py")]
    assert order == sorted(order)
    assert "pytest -m soak" in made.stdout


def test_history_ends_where_virtual_time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(self: ShardProcess) -> None:
        while True:
            self.process.sleep(0)

    monkeypatch.setattr(scheduler, "MAX_EVENTS_A_SECOND", 5000)
    monkeypatch.setattr(ShardProcess, "_commit", commit)
    failure = explore.play(SimulatedHistory(0, "plain", ())).failure or ""
    assert "EndlessLoop in run: 5001 events within a second" in failure
    assert "sink ran last" in failure


def test_history_ends_where_a_step_never_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    def fold(self: _Scoring, polled: object) -> None:
        while True:
            pass

    monkeypatch.setattr(explore, "MAX_CPU_S", 0.5)
    monkeypatch.setattr(_Scoring, "fold", fold)
    failure = explore.play(SimulatedHistory(0, "plain", ())).failure or ""
    assert "EndlessLoop: a history has taken 0.5 s of CPU time in" in failure


def test_shrink_keeps_the_kind_of_failure() -> None:
    drawn = explore.draw_history(0, [next(iter(SHAPES))])
    failing = SimulatedHistory(0, drawn.shape, drawn.faults, failure="p3.1 was scored twice")
    other = SimulatedHistory(0, drawn.shape, (), failure="p3.1 is in batches 1 and 2")
    assert explore.shrink(failing, lambda history: other) is failing
    same = SimulatedHistory(0, drawn.shape, (), failure="p12.0 was scored twice")
    assert explore.shrink(failing, lambda history: same) is same
