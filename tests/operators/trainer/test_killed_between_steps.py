"""kill -9 between two optimizer steps of a batch: weights, moments, critic and schedule stay bit-identical."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from trainer_batches import save_tiny_model

SCHEDULED = {
    "learning_rate": 1e-2,
    "warmup_steps": 2,
    "schedule": "cosine",
    "total_steps": 5,
    "weight_decay": 0.01,
    "mini_batches": 2,
    "epochs": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "critic": {"algorithm": {"name": "ppo", "kl_coefficient": 0.1, "kl_in": "reward"}},  # 8 steps a batch
    "bfloat16": {"algorithm": {"name": "gspo", "kl_coefficient": 0.1}, "precision": "bfloat16"},  # 4
}


KILLS = {"critic": [3, 6, 19, 5], "bfloat16": [1, 10, 7]}


def test_kill_between_steps_does_not_change_weights(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    jobs = []
    for name, changes in CONFIGS.items():
        config = {"optimizer_steps": 4, "checkpoint_every": 2, "learner": SCHEDULED | changes}
        jobs += [(f"{name}-undisturbed", config, [0]), (f"{name}-killed", config, [*KILLS[name], 0])]
    script = Path(__file__).with_name("killed_between_steps.py")
    command = [sys.executable, str(script), str(tmp_path), json.dumps(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in CONFIGS:
        undisturbed, killed = ((tmp_path / f"{name}-{how}" / "digest").read_text() for how in ("undisturbed", "killed"))
        assert undisturbed == killed, done.stdout
