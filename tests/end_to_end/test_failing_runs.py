"""Runs that cannot learn: they are stopped or refused with the reason, and never end as a success."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from laminar_runs import Command, CommandServer, StartRun

from pipelines.inspect.metrics_file import read_metrics

REWARDS = """
def fails_later(text, prompt):
    if not text:  # the check at the start gives an empty response
        return 0.0
    return {}["answr"]


def gives_text(text):
    return "1.0" if text else 0.0
"""


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rewards") / "mine.py"
    file.write_text(REWARDS)
    return file


def reward(file: Path, name: str) -> str:
    return f"score.rewards=[{{name='{file}:{name}'}}]"


def test_run_is_stopped_when_every_reward_fails(
    start_run: StartRun, command_server: CommandServer, rewards: Path, run_id: str
) -> None:
    run = start_run(run_id, reward(rewards, "fails_later"), "run.stop_error_window=24")
    assert run.wait() == 1
    output = run.output()
    error = output[output.index("laminar: ") :]
    assert error.startswith("laminar: the run was stopped, because it cannot learn: errors in 100 % of ")
    assert "The first error, of trajectory " in error
    assert "fails_later: KeyError: 'answr' (mine.py:5)" in error
    assert f'File "{rewards}", line 5, in fails_later' in error
    assert "reached its goal" not in output
    assert run.state()["phase"] == "failed"
    assert "fails_later: KeyError" in run.state()["error"]
    assert any(metric.name == "score" for metric in read_metrics(run.folder / "metrics.jsonl"))
    assert run.leftovers() == []

    def ask(*arguments: str) -> str:
        before = len(run.output())
        command = Command(command_server, run.here, *arguments)
        command.wait()
        return command.output()[before:]

    status = json.loads(ask("runs", "status", "--run", run_id, "--json"))
    assert status["error_share"] == 1.0
    assert "errors      100 % of " in ask("runs", "status", "--run", run_id)
    found = ask(
        "topics", "find", "experiences", "--run", run_id, "-w", "reward_error != ''", "--columns", "reward_error"
    )
    assert "fails_later: KeyError" in found


def test_short_run_of_errors_exits_with_1(start_run: StartRun, rewards: Path, run_id: str) -> None:
    changes = ("run.stop_error_window=0", "trainer.optimizer_steps=2", "prompts.heldout=0")
    run = start_run(run_id, reward(rewards, "gives_text"), *changes)
    assert run.wait() == 1
    output = run.output()
    assert f"Run {run_id} FAILED: its trajectories have errors" in output
    assert "Errors in 100 % of" in output
    assert "reached its goal" not in output
    assert json.loads((run.folder / "summary.json").read_text())["error_share"] == 1.0
