"""The calculator's demonstration: reinforcement learning finds that asking pays, whatever the seed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.run.submission.respawner import LAMINAR

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_reward_rises(seed: int, tmp_path: Path) -> None:
    words = ["run", "examples/calculator.toml", "--set", f"run.seed={seed}", "--set", f"run.folder={tmp_path}"]
    command = [sys.executable, "-c", LAMINAR, *words, "--name", "calculator"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0
    summary = json.loads((tmp_path / "calculator" / "summary.json").read_text())
    assert summary["audit_passed"]
    assert summary["reward_last"] > summary["reward_first"] + 0.2
    assert summary["heldout_after"] > summary["heldout_before"] + 0.2
