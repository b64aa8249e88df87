"""Non-finite losses and gradients are skipped and counted; several consecutive batches of them end the trainer."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from trainer_batches import make_batch, save_tiny_model

from operators.trainer.assembly import CannotTrain
from operators.trainer.config import AlgorithmConfig, LearnerConfig
from operators.trainer.learner import Learner
from operators.trainer.rank_training import RankTraining
from operators.trainer.replay import Replay
from operators.trainer.training_config import TrainingConfig

FIRST_OFFSET = 10


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model")


def test_trainer_fails_after_consecutive_nonfinite_gradients(tmp_path: Path, model: Path) -> None:
    """The batches that the error names are found by their offsets, and can be trained again."""
    config = TrainingConfig(optimizer_steps=9, learner=LearnerConfig(max_skipped_batches=2))
    training = RankTraining(config, model, tmp_path / "checkpoints", 1)
    log = [(make_batch(number, groups=4, samples=4, number=number)[0], 0, FIRST_OFFSET + number) for number in range(5)]
    for each in log:
        training.add_part(*each)
    head = training._learner.model.get_output_embeddings()
    finite, norms = [False, True, False, False], []
    for each in finite[:-1]:
        hook = None if each else head.register_forward_hook(lambda *args: args[2] * math.inf)
        norms.append(training.train()["grad_norm"])
        if hook is not None:
            hook.remove()
    assert [math.isfinite(norm) for norm in norms] == finite[:-1]
    head.register_forward_hook(lambda *args: args[2] * math.inf)
    batches = r"2 \(up to batches partition 0 offset 12\), 3 \(up to batches partition 0 offset 13\)"
    message = f"2 consecutive batches have a non-finite loss or gradient: {batches}"
    with pytest.raises(CannotTrain, match=message) as failed:
        training.train()
    for number, offset in re.findall(r"(\d+) \(up to batches partition 0 offset (\d+)", str(failed.value)):
        until = [each for each in log if each[2] <= int(offset)]
        assert until[-1][0].batch == int(number)
        updates = list(Replay(config, model).train(until, int(number) + 1))
        assert updates[-1].batch == int(number)
        assert math.isfinite(updates[-1].values["grad_norm"])


def test_step_is_skipped_for_a_nonfinite_loss_finite_gradient(model: Path) -> None:
    """Where the reference gives a token no probability, k1 is infinite, and its gradient is that of the logprob."""
    algorithm = AlgorithmConfig(kl_coefficient=0.1, kl_kind="k1")
    learner = Learner(LearnerConfig(algorithm=algorithm, learning_rate=1e-2, warmup_steps=0), model)
    (row,) = make_batch()
    token = next(t for t, trained in zip(row.token_ids.to_pylist(), row.loss_mask.to_pylist(), strict=True) if trained)
    assert learner._reference is not None
    head = learner._reference.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda *args: args[2].index_fill(-1, torch.tensor([token]), -math.inf))
    before = weights_of(learner._actor.weights())
    metrics = learner.update([row])
    assert metrics["loss"] == math.inf
    assert not math.isfinite(metrics["grad_norm"])
    assert metrics["skipped_updates"] == 1
    assert same(before, learner._actor.weights())
    hook.remove()
    assert math.isfinite(learner.update([row])["loss"])
    assert not same(before, learner._actor.weights())
    assert learner.skipped_updates == 1


def test_nonfinite_gradient_of_the_critic_leaves_its_weights(model: Path) -> None:
    config = LearnerConfig(algorithm=AlgorithmConfig(name="ppo"), learning_rate=1e-2, warmup_steps=0, mini_batches=2)
    learner = Learner(config, model)
    assert learner._critic is not None
    learner._critic.value.register_forward_hook(lambda *args: args[2] * (math.inf if torch.is_grad_enabled() else 1))
    actor, critic = weights_of(learner._actor.weights()), weights_of(learner._critic_trained.weights())
    metrics = learner.update(make_batch())
    assert math.isfinite(metrics["grad_norm"])
    assert not math.isfinite(metrics["critic/grad_norm"])
    assert metrics["skipped_updates"] == 2
    assert same(critic, learner._critic_trained.weights())
    assert not same(actor, learner._actor.weights())


@pytest.mark.parametrize("shards", [0, 1], ids=["one copy", "two copies"])
def test_nonfinite_loss_of_one_rank_skips_the_step_on_all(ranks: Path, shards: int) -> None:
    one, other = (json.loads((ranks / f"{rank}-{shards}.json").read_text()) for rank in range(2))
    assert one == other
    assert [skipped for skipped, _ in one] == [0, 1, 1]
    before, after, trained = (digest for _, digest in one)
    assert before == after != trained


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of nonfinite_rank.py."""
    folder = tmp_path_factory.mktemp("nonfinite")
    save_tiny_model(folder / "model")
    command = [sys.executable, str(Path(__file__).with_name("nonfinite_rank.py")), str(folder)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def weights_of(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())
