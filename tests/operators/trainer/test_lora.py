"""LoRA: only adapters are trained, published weights are a plain model's, and resuming is bit-identical."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from stored_states import read_checkpoint
from trainer_batches import make_batch, save_experts, save_tiny_model

from infra.models.checkpoint_folder import load_model, load_tokenizer, write_model
from infra.models.weights import weight_tensors
from operators.trainer.batch import join_parts
from operators.trainer.checkpoint import write_checkpoint
from operators.trainer.checkpoint_files import TrainerPosition
from operators.trainer.config import LearnerConfig, LoraConfig
from operators.trainer.learner import Learner
from operators.trainer.lora import is_adapter
from operators.trainer.packing import micro_batches
from operators.trainer.policy import check_trainable, load_policy, token_logprobs
from schemas.records import PolicyVersion

pytest.importorskip("peft", reason="the extra `lora` is not installed")

CONFIG = LearnerConfig(learning_rate=1e-2, warmup_steps=0, lora=LoraConfig(rank=4), micro_batch_tokens=64)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("lora") / "model")


def test_merged_weights_make_the_same_policy(folder: Path, tmp_path: Path) -> None:
    before = weight_tensors(load_model(folder))
    learner = Learner(CONFIG, folder)
    start = dict(learner.weights().items())
    assert list(start) == list(before)
    assert all(torch.equal(start[name], before[name]) for name in before)
    for number in range(3):
        learner.update(make_batch(seed=number, number=number))
    after = dict(learner.weights().items())
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith("_proj.weight")}
    weights = learner.weights()
    write_model(learner.model, load_tokenizer(folder), weights.specs(), weights.items(), tmp_path / "plain")
    plain = load_policy(tmp_path / "plain", CPU).model
    assert all(torch.equal(tensor, after[name]) for name, tensor in weight_tensors(plain).items())
    batch = join_parts(make_batch())
    (part,) = micro_batches(batch, torch.arange(len(batch)).numpy(), 10**6, CPU)
    with torch.no_grad():
        ours, first = (
            token_logprobs(model, part.packed, 10**6)[0] for model in (learner.model, load_policy(folder, CPU).model)
        )
        torch.testing.assert_close(token_logprobs(plain, part.packed, 10**6)[0], ours, atol=1e-4, rtol=1e-4)
    assert (ours - first).abs().max() > 0.1


def test_lora_trains_only_adapters_with_fixed_initial_values(folder: Path) -> None:
    one = Learner(CONFIG, folder)
    torch.manual_seed(7)
    drawn = torch.get_rng_state()
    other = Learner(CONFIG, folder)
    assert torch.equal(torch.get_rng_state(), drawn)
    ours, theirs = one.state().weights, other.state().weights
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert {tensor.shape[0] for name, tensor in ours.items() if "lora_A" in name} == {4}
    one.update(make_batch())
    assert {name.partition(".")[2] for name in one.state().moments} == set(ours)


def test_initial_adapters_are_uniform_in_the_range_of_peft(folder: Path) -> None:
    policy = load_policy(folder, torch.device("cpu"), lora=LoraConfig(rank=16, alpha=32))
    adapters = {name: value.detach() for name, value in policy.named_parameters() if is_adapter(name)}
    drawn = [value for name, value in adapters.items() if ".lora_A." in name]
    assert drawn
    for value in drawn:
        bound = value.shape[1] ** -0.5
        assert 0.9 * bound < float(value.max()) <= bound
        assert -bound <= float(value.min()) < -0.9 * bound
    assert all(not value.any() for name, value in adapters.items() if ".lora_B." in name)


def test_lora_checkpoint_resumes_bit_identically(folder: Path, tmp_path: Path) -> None:
    learner = Learner(CONFIG, folder)
    learner.update(make_batch())
    place = write_checkpoint(tmp_path, learner.state(), TrainerPosition(PolicyVersion(1, 1), (3,), 16))
    resumed = Learner(CONFIG, folder)
    resumed.restore(read_checkpoint(place)[0])
    for each in (learner, resumed):
        each.update(make_batch(seed=1, number=1))
    one, other = learner.state(), resumed.state()
    for kind in ("weights", "moments"):
        ours, theirs = getattr(one, kind), getattr(other, kind)
        assert set(ours) == set(theirs)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), kind


def test_restore_rejects_another_lora_rank(folder: Path) -> None:
    learner = Learner(CONFIG, folder)
    for lora in (LoraConfig(rank=2), LoraConfig()):
        state = Learner(LearnerConfig(lora=lora), folder).state()
        with pytest.raises(ValueError, match="do not match the adapters"):
            learner.restore(state)


@pytest.mark.parametrize(
    ("targets", "reason"),
    [
        (("q_proj", "v_porj"), "no layer is called 'v_porj'; there are .*, v_proj"),
        (("q_proj", "lm_head"), "'lm_head' shares the weights of the embedding"),
        (("embed_tokens",), "'embed_tokens' is of type Embedding, and only linear layers have adapters"),
        (("input_layernorm",), "'input_layernorm' is of type Qwen2RMSNorm"),
        (("self_attn",), "'self_attn' is of type Qwen2Attention"),
        (("roj",), "no layer is called 'roj'"),
    ],
)
def test_learner_rejects_lora_targets_it_cannot_train(folder: Path, targets: tuple[str, ...], reason: str) -> None:
    config = LearnerConfig(lora=LoraConfig(rank=2, targets=targets))
    for refuse in (partial(Learner, config, folder), partial(check_trainable, folder, config, 1)):
        with pytest.raises(ValueError, match=rf"^trainer\.learner\.lora\.targets: {reason}"):
            refuse()


def test_adapter_of_an_output_layer_of_its_own_is_published(folder: Path) -> None:
    save_experts(folder.parent / "experts")  # whose output weights are not tied
    config = replace(CONFIG, lora=LoraConfig(rank=4, targets=("layers.0.self_attn.q_proj", "lm_head")))
    learner = Learner(config, folder.parent / "experts")
    before = dict(learner.weights().items())
    learner.update(make_batch())
    changed = {name for name, tensor in learner.weights().items() if not torch.equal(tensor, before[name])}
    assert changed == {"model.layers.0.self_attn.q_proj.weight", "lm_head.weight"}


def test_lora_config_names_the_package_without_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"install the extra lora"):
        LoraConfig(rank=8)
    assert LoraConfig().rank == 0
