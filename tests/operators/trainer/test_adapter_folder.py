"""Adapters alone: peft loads them over the base model, whose hashes are beside them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trainer_batches import make_batch, save_tiny_model

from infra.models.checkpoint_folder import load_model
from operators.trainer.adapter_folder import base_digests, write_adapters
from operators.trainer.checkpoint import write_checkpoint
from operators.trainer.checkpoint_files import TrainerPosition
from operators.trainer.config import LearnerConfig, LoraConfig
from operators.trainer.learner import Learner
from schemas.records import PolicyVersion

peft = pytest.importorskip("peft", reason="the extra `lora` is not installed")
LORA = LoraConfig(rank=4, alpha=8)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("adapters") / "model")


def checkpoint(learner: Learner, folder: Path) -> Path:
    """A checkpoint of `learner` in `folder`."""
    return write_checkpoint(folder, learner.state(), TrainerPosition(PolicyVersion(1, 1), (0,), 0))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft
def test_peft_loads_the_adapters_of_a_checkpoint(base: Path, tmp_path: Path) -> None:
    learner = Learner(LearnerConfig(learning_rate=1e-2, warmup_steps=0, lora=LORA), base)
    learner.update(make_batch())
    out = tmp_path / "adapters"
    out.mkdir()
    size = write_adapters(checkpoint(learner, tmp_path / "checkpoints"), LORA, base, out, "1.1")
    assert size == sum(tensor.nbytes for tensor in learner.state().weights.values())
    merged = peft.PeftModel.from_pretrained(load_model(base), str(out)).merge_and_unload().state_dict()
    changed = 0
    for name, tensor in learner.weights().items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-6, rtol=1e-5)
        changed += not torch.equal(tensor, load_model(base).state_dict()[name])
    assert changed >= 14  # seven linear layers in each of two layers
    assert json.loads((out / "base_model.json").read_text())["version"] == "1.1"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft
@pytest.mark.parametrize(
    ("targets", "named"),
    [
        (("q_proj",), ["q_proj"]),
        (("layers.0.self_attn.q_proj", "v_proj"), ["model.layers.0.self_attn.q_proj", "v_proj"]),
    ],
)
def test_peft_adds_adapters_to_the_trained_layers_alone(
    base: Path, tmp_path: Path, targets: tuple[str, ...], named: list[str]
) -> None:
    lora = replace(LORA, targets=targets)
    learner = Learner(LearnerConfig(lora=lora), base)
    write_adapters(checkpoint(learner, tmp_path / "checkpoints"), lora, base, tmp_path, "1.0")
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == named
    loaded = peft.PeftModel.from_pretrained(load_model(base), str(tmp_path)).state_dict()
    of_peft = {name.removeprefix("base_model.model.") for name in loaded if ".lora_" in name}
    assert of_peft == set(learner.state().weights)


def test_adapters_record_the_digests_of_their_base(base: Path, tmp_path: Path) -> None:
    learner = Learner(LearnerConfig(lora=LORA), base)
    write_adapters(checkpoint(learner, tmp_path / "checkpoints"), LORA, base, tmp_path, "1.0")
    recorded = json.loads((tmp_path / "base_model.json").read_text())["blake3"]
    assert recorded == base_digests(base)
    other = Path(shutil.copytree(base, tmp_path / "other"))
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    assert recorded.keys() == base_digests(other).keys()
    assert recorded != base_digests(other)


def test_checkpoint_without_adapters_is_rejected(base: Path, tmp_path: Path) -> None:
    place = checkpoint(Learner(LearnerConfig(), base), tmp_path / "checkpoints")
    with pytest.raises(ValueError, match="has no adapters: its run trained all weights"):
        write_adapters(place, LORA, base, tmp_path, "1.0")
