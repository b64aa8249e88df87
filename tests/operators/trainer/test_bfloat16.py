"""bfloat16 gradients approximate float32 gradients in every optimizer step, on one rank and on two."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from bfloat16_errors import TOKEN_MEAN, bfloat16_errors
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_batches import make_batch, save_experts, save_tiny_model

from operators.trainer.config import AlgorithmConfig, LearnerConfig, Precision
from operators.trainer.learner import Learner

BOUND = 0.02
"""Of every step."""
TOKEN_MEAN_BOUND = 0.03
OF_ONE_STEP = 1.5
"""Of the mean over an update's steps, relative to an update of one step. The largest of up to 16 errors is larger than
one of them, by how much depends on the processor, so single steps have `BOUND` alone."""
COUNTS = [(mini_batches, epochs) for mini_batches in (1, 2, 4) for epochs in (1, 2, 4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bfloat16")
    save_tiny_model(made / "model", scale=2.0)
    return made


@pytest.fixture(scope="module")
def one_step(folder: Path) -> float:
    return max(bfloat16_errors(folder / "model", 1, 1))


@pytest.mark.parametrize(("mini_batches", "epochs"), COUNTS)
def test_bfloat16_gradients_approximate_float32(folder: Path, one_step: float, mini_batches: int, epochs: int) -> None:
    check(bfloat16_errors(folder / "model", mini_batches, epochs), mini_batches * epochs, one_step)


@pytest.mark.parametrize(("mini_batches", "epochs"), [(1, 1), (4, 4)])
def test_bfloat16_gradients_of_the_default_approximate_float32(folder: Path, mini_batches: int, epochs: int) -> None:
    errors = bfloat16_errors(folder / "model", mini_batches, epochs, algorithm=TOKEN_MEAN)
    assert 1e-4 < max(errors) <= TOKEN_MEAN_BOUND


def test_bfloat16_gradients_of_two_ranks_approximate_float32(folder: Path) -> None:
    check_two_ranks(folder, [(1, 1), (2, 2)])


@pytest.mark.soak
def test_bfloat16_gradients_of_two_ranks_in_every_case(folder: Path) -> None:
    check_two_ranks(folder, COUNTS)


def test_experts_of_one_rank_compute_in_bfloat16(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    save_experts(tmp_path / "experts")
    learner, used = Learner(LearnerConfig(precision="bfloat16"), tmp_path / "experts"), set[tuple[str, torch.dtype]]()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if (name := str(function)).endswith(("_grouped_mm.default", "aten.mm.default")):
                used.add((name, args[0].dtype))
            return function(*args, **(kwargs or {}))

    with Products():
        learner.update(make_batch())
    assert used == {("aten.mm.default", torch.bfloat16)}


def test_reference_in_bfloat16_has_half_the_bytes_and_a_close_kl(folder: Path) -> None:
    divergences, sizes = [], []
    for dtype in get_args(Precision):
        algorithm = AlgorithmConfig(kl_coefficient=0.1)
        config = LearnerConfig(algorithm=algorithm, reference_dtype=dtype, mini_batches=2, learning_rate=1e-3)
        learner = Learner(config, folder / "model")
        learner.update(make_batch())
        divergences.append(learner.update(make_batch(seed=1, number=1))["kl/ref"])
        assert learner._reference is not None
        sizes.append(sum(each.nbytes for each in learner._reference.parameters()))
    assert sizes[0] == 2 * sizes[1]
    assert divergences[1] == pytest.approx(divergences[0], abs=0.02)
    assert divergences[0] > 0


def check_two_ranks(folder: Path, counts: list[tuple[int, int]]) -> None:
    command = [sys.executable, str(Path(__file__).with_name("bfloat16_errors.py")), str(folder), json.dumps(counts)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "errors.json").read_text())
    for (mini_batches, epochs), errors in zip(counts, found, strict=True):
        check(errors, mini_batches * epochs, found[0][0])


def check(errors: list[float], steps: int, one_step: float) -> None:
    assert len(errors) == steps
    assert min(errors) > 1e-4
    assert max(errors) <= BOUND, errors
    assert sum(errors) / steps <= OF_ONE_STEP * one_step, errors
