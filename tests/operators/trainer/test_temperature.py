"""Engine, buffer and learner together: tokens are trained at the temperature at which they were sampled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sampled_batches import sampled_batch
from trainer_batches import save_tiny_model

from infra.models.checkpoint_folder import load_model
from operators.rollout.transformers_engine import TransformersEngine
from operators.trainer.batch import TrainingBatch, join_parts
from operators.trainer.config import AlgorithmConfig, LearnerConfig
from operators.trainer.learner import Learner
from operators.trainer.losses import kl_penalty
from schemas.records import MicroBatch

TEMPERATURES = (0.7, 1.0, 1.6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tempered") / "model")


@pytest.fixture(scope="module")
def drawn(folder: Path) -> list[MicroBatch]:
    """A batch sampled by the engine and packed by the buffer, with one group per temperature."""
    return sampled_batch(TransformersEngine(load_model(folder), slots=8), TEMPERATURES)


def test_importance_ratios_are_one_at_staleness_0(folder: Path, drawn: list[MicroBatch]) -> None:
    config = LearnerConfig(algorithm=AlgorithmConfig(kl_coefficient=0.1), micro_batch_tokens=80, logits_chunk_tokens=50)
    metrics = Learner(config, folder).update(drawn)
    for name in ("importance_ratio/mean", "importance_ratio/max", "ess"):
        assert metrics[name] == pytest.approx(1, abs=1e-4), name
    for name in ("kl/mismatch", "kl/ref", "mismatch/kl", "mismatch/share_above_0.01"):
        assert metrics[name] == pytest.approx(0, abs=1e-6), name
    assert metrics["mismatch/abs_max"] <= 1e-4
    batch = join_parts(drawn)
    tempered = distributions(load_model(folder), batch)
    assert metrics["entropy"] == pytest.approx(float(entropies(tempered).mean()), rel=1e-5)
    behaviour = torch.from_numpy(batch.behaviour[batch.loss_mask])
    torch.testing.assert_close(of_targets(tempered, batch), behaviour, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_reference_uses_the_sampling_temperature(folder: Path, drawn: list[MicroBatch], kl_in: str) -> None:
    algorithm = AlgorithmConfig(kl_coefficient=0.1, kl_in=kl_in, proximal="update_start")  # type: ignore[arg-type]
    learner = Learner(LearnerConfig(algorithm=algorithm, learning_rate=1e-2, warmup_steps=0), folder)
    learner.update(drawn)
    moved, initial, batch = load_model(folder), load_model(folder), join_parts(drawn)
    moved.load_state_dict(learner.model.state_dict())
    now, before = (of_targets(distributions(model, batch), batch) for model in (moved, initial))
    assert learner.update(drawn)["kl/ref"] == pytest.approx(float(kl_penalty(now, before).mean()), rel=1e-4)


def distributions(model: torch.nn.Module, batch: TrainingBatch) -> torch.Tensor:
    """Logprobs [trained tokens, vocabulary] by a plain forward of each sequence alone."""
    found = []
    for start, length, temperature in zip(batch.starts, batch.lengths, batch.temperatures, strict=True):
        ids, mask = (torch.from_numpy(each[start : start + length]) for each in (batch.token_ids, batch.loss_mask))
        with torch.inference_mode():
            logits = model(input_ids=ids[None]).logits[0, :-1][mask[1:]]
        found.append((logits / float(temperature)).log_softmax(-1))
    return torch.cat(found)


def entropies(logprobs: torch.Tensor) -> torch.Tensor:
    return -(logprobs.exp() * logprobs).sum(-1)


def of_targets(logprobs: torch.Tensor, batch: TrainingBatch) -> torch.Tensor:
    targets = torch.from_numpy(batch.token_ids[batch.loss_mask])
    return logprobs.gather(1, targets[:, None])[:, 0]
