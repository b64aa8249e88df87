"""Non-finite gradients are skipped and counted; several consecutive batches of them end the trainer."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from trainer_batches import make_batch, save_tiny_model

from operators.trainer.config import LearnerConfig
from operators.trainer.rank_training import RankTraining
from operators.trainer.training_config import TrainingConfig


def test_trainer_fails_after_consecutive_nonfinite_gradients(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    config = TrainingConfig(optimizer_steps=9, learner=LearnerConfig(max_skipped_batches=2))
    training = RankTraining(config, model, tmp_path / "checkpoints", 1)
    for number in range(5):
        (part,) = make_batch(number, groups=4, samples=4, number=number)
        training.add_part(part, 0, 10 + number)
    head = training._learner.model.get_output_embeddings()
    finite, norms = [False, True, False, False], []
    for each in finite[:-1]:
        hook = None if each else head.register_forward_hook(lambda *args: args[2] * math.inf)
        norms.append(training.train()["grad_norm"])
        if hook is not None:
            hook.remove()
    assert [math.isfinite(norm) for norm in norms] == finite[:-1]
    head.register_forward_hook(lambda *args: args[2] * math.inf)
    batches = r"2 \(up to offsets 12 of batches\), 3 \(up to offsets 13 of batches\)"
    message = f"2 consecutive batches have non-finite gradients: {batches}"
    with pytest.raises(RuntimeError, match=message):
        training.train()
