"""Two ranks over gloo, each with its part of a batch, take the optimizer steps of one rank with the whole batch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from safetensors import safe_open
from trainer_batches import save_tiny_model
from two_ranks import BATCHES, parts, train

from operators.trainer.config import LearnerConfig
from operators.trainer.learner import Learner

SMALL = {"micro_batch_tokens": 48, "learning_rate": 1e-3, "warmup_steps": 0, "weight_decay": 0.01}
CONFIGS: list[dict[str, Any]] = [
    SMALL,
    SMALL | {"algorithm": {"name": "ppo", "kl_coefficient": 0.1, "kl_in": "reward"}, "mini_batches": 2},
]
Found = tuple[dict[str, torch.Tensor], dict[str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of two ranks."""
    made = tmp_path_factory.mktemp("ranks")
    save_tiny_model(made / "model")
    (made / "configs.json").write_text(json.dumps(CONFIGS))
    script = Path(__file__).with_name("two_ranks.py")
    done = subprocess.run([sys.executable, str(script), str(made)], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return made


@pytest.mark.parametrize("number", range(len(CONFIGS)), ids=["grpo", "ppo"])
def test_two_ranks_match_the_gradients_of_one(folder: Path, number: int) -> None:
    config = TypeAdapter(LearnerConfig).validate_json(json.dumps(CONFIGS[number]))
    batches = [[row for rank in parts(each) for row in rank] for each in range(BATCHES)]
    expected, metrics = train(Learner(config, folder / "model"), batches)
    for rank in range(2):
        found, metadata = read(folder / f"{rank}-{number}.safetensors")
        assert set(found) == set(expected)
        for name, tensor in expected.items():
            # 2e-6 is 0.2 % of a step: AdamW takes full steps for gradients near rounding error, such as those of the
            # key biases.
            assert (found[name] - tensor).norm() <= 1e-4 * tensor.norm() + 2e-6, name
        for batch in range(BATCHES):
            one, other = (flat(tensors, f"gradient.{batch}.") for tensors in (found, expected))
            assert (one - other).norm() <= 1e-5 * other.norm()
        assert metadata["resumed"] == "true"
        for ours, theirs in zip(metrics, json.loads(metadata["metrics"]), strict=True):
            known = {name: ours[name] for name in ours if not name.startswith(("time/", "throughput/"))}
            assert {name: theirs[name] for name in known} == pytest.approx(known, rel=1e-4, abs=1e-6)


def read(file: Path) -> Found:
    """The tensors and metadata of `file`."""
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118


def flat(tensors: dict[str, torch.Tensor], prefix: str) -> torch.Tensor:
    return torch.cat([tensor.flatten() for name, tensor in sorted(tensors.items()) if name.startswith(prefix)])
