"""The ways of the code that only a GPU takes: copies to and from it, sharded and shared models, mixtures of experts.

Everything runs on tiny models in float32. AdamW's ε is far above the gradients, so that a difference of gradients makes
one of the same size in the weights.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.engine_sides import completions
from benchmarks.gpu.batches import training_batch
from benchmarks.gpu.device import make_model
from benchmarks.gpu.engine import requests
from benchmarks.gpu.equality import compare
from benchmarks.gpu.figures import Figure
from benchmarks.gpu.learner import OneRank, learner_config
from benchmarks.gpu.settings import TINY, Settings
from infra.models.checkpoint_folder import load_model
from infra.models.local_part import local_part
from operators.rollout.kv_slots import KVSlots
from operators.rollout.transformers_engine import TransformersEngine
from operators.trainer.config import AlgorithmConfig, LoraConfig
from operators.trainer.learner import Learner
from operators.trainer.ranks import ALONE, Ranks
from schemas.records import MicroBatch, PolicyVersion

Goal = tuple[str, float]
TOKENS = 32
PENALTY = AlgorithmConfig(kl_coefficient=0.1)
PPO = AlgorithmConfig(name="ppo")


def paths(settings: Settings, model: Path) -> list[Figure]:
    """Weights after two updates on the device beside those on the CPU; equality of repeated updates, of a restored
    state and of moved KV."""
    torch.set_num_threads(1)  # several only wait for each other with so small a model
    tiny, mixture = model.with_name("paths"), model.with_name("paths-mixture")
    make_model(replace(settings, shape=TINY, device="cpu"), tiny)
    make_mixture(mixture)
    backend = "gloo" if settings.device == "cpu" else f"cpu:gloo,{settings.device}:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    ways: dict[str, tuple[Path, Ranks, dict[str, Any]]] = {
        "sharded, offloaded moments": (tiny, OneRank(), {"offload": ("moments",)}),
        "sharded, kept gathered": (tiny, OneRank(), {"keep_gathered": True}),
        "offloaded reference": (tiny, ALONE, {"algorithm": PENALTY, "offload": ("reference",)}),
        "PPO": (tiny, ALONE, {"algorithm": PPO}),
        "PPO by turns": (tiny, ALONE, {"algorithm": PPO, "share_device": True}),
        "mixture of experts": (mixture, ALONE, {}),
        "sharded, mixture of experts": (mixture, OneRank(), {}),
    }
    figures = []
    if find_spec("peft") is None:
        figures.append(Figure("weights, LoRA", math.nan, "", note="peft is not installed"))
    else:
        ways["LoRA"] = tiny, ALONE, {"lora": LoraConfig(rank=4)}
    try:
        for name, (folder, ranks, options) in ways.items():
            figures += _attempt(f"weights, {name}", partial(_difference, settings, folder, ranks, **options))
    finally:
        dist.destroy_process_group()
    for name, measure in (("learners", _repeated), ("moved KV", _moved_kv)):
        figures += _attempt(name, partial(measure, settings, tiny))
    return figures


def _attempt(name: str, measure: Callable[[], dict[str, tuple[float, Goal]]]) -> list[Figure]:
    """The figures of `measure`; one without a value, whose goal is not reached, if it fails: the others go on."""
    try:
        return [Figure(each or name, value, "", goal) for each, (value, goal) in measure().items()]
    except Exception as error:  # noqa: BLE001 - whatever fails is this figure's result
        traceback.print_exc()
        return [Figure(name, math.nan, "", ("<=", 0), f"{type(error).__name__}: {error}"[:100])]


def make_mixture(folder: Path) -> None:
    """Save a tiny mixture of experts."""
    torch.manual_seed(0)
    sizes = {name: value for name, value in TINY.config.items() if name != "use_sliding_window"}
    experts = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(**sizes, **experts, bos_token_id=None, eos_token_id=None, pad_token_id=0)  # type: ignore[arg-type]
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def learner_of(settings: Settings, folder: Path, device: str, ranks: Ranks = ALONE, **options: Any) -> Learner:
    """A learner in float32 whose weights change by much, and alike by like gradients."""
    config = learner_config(replace(settings, micro_batch_tokens=256), "float32", **options)
    return Learner(replace(config, learning_rate=1e-2, warmup_steps=0, epsilon=1e-2), folder, device, ranks)


def _batch(number: int) -> MicroBatch:
    """Batch `number`, which changes the weights of version 0.`number`."""
    drawn = np.random.default_rng([5, number]).integers(1, 500, (8, 64))
    logprobs = np.where(np.arange(64) >= 32, -np.log(int(TINY.config["vocab_size"])), 0.0)
    return training_batch(drawn, 32, [logprobs] * 8, np.tile([0.0, 1.0], 4), PolicyVersion(0, number))


def _state(learner: Learner) -> dict[str, Tensor]:
    """Copies of all tensors of the state but the random numbers, flattened, on the CPU."""
    tensors = learner.state().tensors().items()
    return {name: local_part(each).elements.cpu().clone() for name, each in tensors if name != "random_state"}


def _weights(learner: Learner) -> Tensor:
    """The weights of the policy and of the critic, if any, as one vector."""
    return torch.cat([each for name, each in _state(learner).items() if "moments." not in name])


def _difference(settings: Settings, folder: Path, ranks: Ranks, **options: Any) -> dict[str, tuple[float, Goal]]:
    """How far, as a share of their change, the weights after two updates on the device differ from
    those on the CPU, unsharded and without offloading."""
    plain = {key: value for key, value in options.items() if key not in ("offload", "share_device", "keep_gathered")}
    changes = []
    for learner in (
        learner_of(settings, folder, "cpu", **plain),
        learner_of(settings, folder, settings.device, ranks, **options),
    ):
        before = _weights(learner)
        for number in range(2):
            learner.update([_batch(number)])
        changes.append(_weights(learner) - before)
    expected, found = (change.double() for change in changes)
    return {"": (float((found - expected).norm() / expected.norm()), ("<=", 1e-3))}


def _repeated(settings: Settings, folder: Path) -> dict[str, tuple[float, Goal]]:
    """How many tensors of the state differ: of two learners, and of one that went on from the other's state."""
    one, other, restored = (learner_of(settings, folder, settings.device) for _ in range(3))
    for learner in (one, other):
        learner.update([_batch(0)])
    restored.restore(one.state())
    for learner in (one, other, restored):
        learner.update([_batch(1)])
    expected = _state(one)
    return {
        "differing tensors, same twice": (_differing(expected, _state(other)), ("<=", 0)),
        "differing tensors, restored state": (_differing(expected, _state(restored)), ("<=", 0)),
    }


def _differing(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> int:
    return sum(not torch.equal(expected[name], found[name]) for name in expected.keys() | found.keys())


def _moved_kv(settings: Settings, folder: Path) -> dict[str, tuple[float, Goal]]:
    """KV that leaves a row and enters another, as bytes; tokens of requests that move with their KV."""
    slots = KVSlots(
        layers=2, rows=4, heads=2, context=64, head_size=16, dtype=torch.bfloat16, device=torch.device(settings.device)
    )
    slots.tensor.normal_()
    kv = slots.export_row(1, 40)
    assert slots.import_row(2, kv, 40)
    assert slots.write_row(3, 40, 40, slots.read_row(1, 40)) == {0, 1}
    rows = slots.tensor[:, :, :, :, :40].unbind(2)
    wrong = sum(not torch.equal(rows[1], row) for row in rows[2:])
    batch = requests(8, TOKENS, 1)
    whole, first, second = (_open(settings, folder) for _ in range(3))
    for request in batch:
        first.submit(request)
    ended = [each for _ in range(TOKENS // 2) for each in first.step()]
    assert not ended
    moving = first.release([request.trajectory_id for request in batch], with_kv=True)
    assert all(partial.kv is not None for partial in moving.values())
    resumed = [replace(request, partial=moving[request.trajectory_id]) for request in batch]
    same, _ = compare(completions(whole, batch), completions(second, resumed))
    return {"differing rows, moved KV": (wrong, ("<=", 0)), "equal tokens, moved KV": (same, (">=", 0.99))}


def _open(settings: Settings, folder: Path) -> TransformersEngine:
    return TransformersEngine(load_model(folder).to(settings.device), slots=8, context=128)
