"""What a learner refuses when it is made, and what it restores; a critic beside a policy that is not trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_batches import make_batch, save_tiny_model

from operators.trainer import learner as learners
from operators.trainer.config import AlgorithmConfig, CriticConfig, LearnerConfig, ParameterGroup
from operators.trainer.context_parallel import ContextGroup
from operators.trainer.learner import Learner
from schemas import columns

PPO = LearnerConfig(algorithm=AlgorithmConfig(name="ppo"), warmup_steps=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("learner") / "model")


def test_heads_must_divide_by_the_ranks_of_a_context(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learners, "open_context", lambda ranks: ContextGroup(0, 3))
    with pytest.raises(ValueError, match=r"context_ranks is 3, but the model has 2 attention heads"):
        Learner(LearnerConfig(), folder)


def test_parameter_group_without_a_parameter_is_rejected(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"match = 'embd' matches no trained parameter"):
        Learner(LearnerConfig(parameter_groups=(ParameterGroup(match="embd"),)), folder)


def test_reference_has_no_gradients(folder: Path) -> None:
    learner = Learner(LearnerConfig(algorithm=AlgorithmConfig(kl_coefficient=0.1)), folder)
    assert learner._reference is not None
    assert not any(parameter.requires_grad for parameter in learner._reference.parameters())


def test_state_without_moments_clears_them(folder: Path) -> None:
    learner = Learner(LearnerConfig(), folder)
    learner.update(make_batch())
    assert learner.state().moments
    learner.restore(Learner(LearnerConfig(), folder).state())
    assert not learner.state().moments


def test_skipped_steps_are_restored(folder: Path) -> None:
    learner = Learner(LearnerConfig(), folder)
    learner.restore(replace(learner.state(), skipped_updates=3))
    assert learner.skipped_updates == 3
    assert learner.update(make_batch())["skipped_updates"] == 3


@pytest.mark.parametrize(("of", "into"), [(PPO, LearnerConfig()), (LearnerConfig(), PPO)])
def test_state_with_another_critic_is_rejected(folder: Path, of: LearnerConfig, into: LearnerConfig) -> None:
    with pytest.raises(ValueError, match=r"critic\.weights do not match the critic"):
        Learner(into, folder).restore(Learner(of, folder).state())


def test_critic_has_its_rate_when_the_policy_has_none(folder: Path) -> None:
    learner = Learner(replace(PPO, learning_rate=0.0, critic=CriticConfig(learning_rate=0.01)), folder)
    learner.update(make_batch())
    assert {group["lr"] for group in learner._critic_trained._optimizer.param_groups} == {0.01}


def test_critic_explains_nothing_without_trained_tokens(folder: Path) -> None:
    (row,) = make_batch()
    masked = replace(row, loss_mask=columns.flags(np.zeros(len(row.token_ids), bool)))
    metrics = Learner(PPO, folder).update([masked])
    assert metrics["critic/explained_variance"] == 0
    assert metrics["critic/loss"] == metrics["loss"] == 0
    assert torch.isfinite(torch.tensor(list(metrics.values()))).all()
