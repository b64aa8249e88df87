"""Compiled layers compute what the model computes; attention and experts are left as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters
from trainer_batches import make_batch, save_experts, save_tiny_model

from operators.trainer import policy
from operators.trainer.config import LearnerConfig
from operators.trainer.learner import Learner
from operators.trainer.policy import compile_layers, layers_of, trainable_model

CONFIG = LearnerConfig(warmup_steps=0, micro_batch_tokens=64)
COMPILED = LearnerConfig(warmup_steps=0, micro_batch_tokens=64, compile=True)


@pytest.fixture
def eager_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without generating code, which takes a C compiler and a minute."""
    monkeypatch.setattr(policy, "compile_layers", lambda model: compile_layers(model, "aot_eager"))
    counters.clear()


def compiled_children(folder: Path) -> set[str]:
    """The children of a compiled model's layers that are compiled."""
    model = trainable_model(folder, gradient_checkpointing=False)
    compile_layers(model)
    found = [child for layer in layers_of(model) for child in layer.named_children()]
    return {name for name, module in found if module._compiled_call_impl is not None}


def test_attention_and_experts_are_not_compiled(tmp_path: Path) -> None:
    norms = {"input_layernorm", "post_attention_layernorm"}
    assert compiled_children(save_tiny_model(tmp_path / "model")) == {"mlp", *norms}
    save_experts(tmp_path / "experts")
    assert compiled_children(tmp_path / "experts") == norms


@pytest.mark.usefixtures("eager_backend")
def test_compiled_layers_train_as_the_model_does(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    learners = [Learner(config, folder) for config in (CONFIG, COMPILED)]
    for number in range(2):
        one, other = (learner.update(make_batch(number, number=number)) for learner in learners)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    assert counters["stats"]["calls_captured"] > 0
    assert not counters["graph_break"]
    for one, other in zip(*(learner.model.parameters() for learner in learners), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_model_that_cannot_be_compiled_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: object) -> None:
        raise TorchDynamoException("no C compiler found")

    monkeypatch.setattr(policy, "compile_layers", fail)
    with pytest.raises(ValueError, match="cannot be trained: no C compiler found"):
        Learner(COMPILED, save_tiny_model(tmp_path / "model"))
