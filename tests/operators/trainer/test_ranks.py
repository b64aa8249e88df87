"""Two ranks over gloo, each with its part of a batch, take the steps of one that has all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from rank_of_two import BATCHES, parts, train
from safetensors import safe_open
from trainer_batches import save_tiny_model

from operators.trainer.config import LearnerConfig
from operators.trainer.learner import Learner

SMALL = {"micro_batch_tokens": 48, "learning_rate": 1e-3, "warmup_steps": 0, "weight_decay": 0.01}


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        SMALL | {"algorithm": {"name": "ppo", "kl_coefficient": 0.1, "kl_in": "reward"}, "mini_batches": 2},
    ],
    ids=["grpo", "ppo"],
)
def test_two_ranks_have_the_gradients_of_one(tmp_path: Path, config: dict[str, Any]) -> None:
    model = save_tiny_model(tmp_path / "model")
    script = Path(__file__).with_name("rank_of_two.py")
    words = [str(tmp_path / "rendezvous"), str(model), json.dumps(config)]
    processes = [
        subprocess.Popen([sys.executable, script, str(rank), *words, tmp_path / f"{rank}"], stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=170)[1].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], errors
    settings = TypeAdapter(LearnerConfig).validate_json(json.dumps(config))
    expected, told = train(
        Learner(settings, model), [[row for rank in parts(number) for row in rank] for number in range(BATCHES)]
    )
    for rank in range(2):
        with safe_open(tmp_path / f"{rank}.safetensors", framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        assert set(found) == set(expected)
        for name, tensor in expected.items():
            assert (found[name] - tensor).norm() <= 1e-4 * tensor.norm() + 1e-9, name
        for number in range(BATCHES):
            one, other = (flat(tensors, f"gradient.{number}.") for tensors in (found, expected))
            assert (one - other).norm() <= 1e-5 * other.norm()
        assert metadata["resumed"] == "true"
        for ours, theirs in zip(told, json.loads(metadata["told"]), strict=True):
            timed = {name for name in ours if name.startswith(("time/", "throughput/"))}
            known = {name: value for name, value in ours.items() if name not in timed}
            assert {name: theirs[name] for name in known} == pytest.approx(known, rel=1e-4, abs=1e-6)


def flat(tensors: dict[str, torch.Tensor], prefix: str) -> torch.Tensor:
    return torch.cat([tensor.flatten() for name, tensor in sorted(tensors.items()) if name.startswith(prefix)])
