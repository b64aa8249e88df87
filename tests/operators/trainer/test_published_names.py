"""Weights are published under the names and shapes of the model's checkpoint, so that any engine can load them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny_models import FAMILIES, MIXTURES, tiny_model
from trainer_batches import make_batch

from infra.models.checkpoint_folder import load_model
from infra.models.weights import load_weights, save_weights, weight_tensors
from operators.trainer.config import LearnerConfig, LoraConfig
from operators.trainer.learner import Learner

Shapes = dict[str, tuple[int, ...]]


def saved(folder: Path, kind: str) -> Path:
    tiny_model(kind).save_pretrained(folder)
    return folder


def shapes_in(file: Path) -> Shapes:
    with safe_open(file, framework="pt") as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118


@pytest.mark.parametrize("kind", [*FAMILIES, *MIXTURES])
def test_published_names_and_shapes_match_the_checkpoint(tmp_path: Path, kind: str) -> None:
    folder = saved(tmp_path, kind)
    model = load_model(folder)
    assert {n: tuple(t.shape) for n, t in weight_tensors(model).items()} == shapes_in(folder / "model.safetensors")


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_are_loaded_in_place(tmp_path: Path, kind: str) -> None:
    folder = saved(tmp_path / "model", kind)
    changed, other = load_model(folder), load_model(folder)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1.5)
    save_weights(changed, tmp_path / "weights.safetensors")
    load_weights(other, tmp_path / "weights.safetensors")
    pairs = zip(changed.state_dict().values(), other.state_dict().values(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


@pytest.mark.parametrize("kind", MIXTURES)
def test_mixture_of_experts_is_trained_published_and_restored(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    MIXTURES[kind](vocab_size=260).save_pretrained(tmp_path)
    folder = tmp_path
    learner, resumed = (Learner(LearnerConfig(learning_rate=1e-2, warmup_steps=0), folder) for _ in range(2))
    before = {name: tensor.clone() for name, tensor in learner.weights().items()}
    learner.update(make_batch())
    moved = [name for name, tensor in learner.weights().items() if not torch.equal(tensor, before[name])]
    assert any(f".experts.3.{'w1' if kind == 'mixtral' else 'gate_proj'}.weight" in name for name in moved)
    published = {name: tuple(tensor.shape) for name, tensor in learner.weights().items()}
    assert published == shapes_in(folder / "model.safetensors")
    resumed.restore(learner.state())
    for each in (learner, resumed):
        each.update(make_batch(1))
    found = dict(resumed.weights().items())
    assert all(torch.equal(tensor, found[name]) for name, tensor in learner.weights().items())


def test_weights_of_a_plain_model_are_at_hand(tmp_path: Path) -> None:
    """Merged ones are computed one at a time: all at once would take the memory of another model."""
    folder = saved(tmp_path / "model", "qwen2")
    assert Learner(LearnerConfig(), folder).weights().at_hand
    assert not Learner(LearnerConfig(lora=LoraConfig(rank=2)), folder).weights().at_hand
