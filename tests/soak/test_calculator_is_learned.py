"""The calculator's demonstration: reinforcement learning finds, for every seed, that tool calls raise the reward."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from pipelines.distribution import LAMINAR

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_calculator_run_raises_reward_and_accuracy(seed: int, tmp_path: Path) -> None:
    arguments = ["run", "examples/calculator.toml", "--set", f"run.seed={seed}", "--set", f"run.folder={tmp_path}"]
    command = [*LAMINAR, *arguments, "--name", "calculator"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0
    summary = json.loads((tmp_path / "calculator" / "summary.json").read_text())
    assert summary["audit_passed"]
    assert summary["reward_last"] > summary["reward_first"] + 0.2
    assert summary["heldout_after"] > summary["heldout_before"] + 0.2
