"""Fused layers: which layers of which families compute by kernels, and that they compute the same."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import interpreted_kernels
import pytest
import torch
from tiny_models import FAMILIES, MIXTURES, tiny_model
from torch import Tensor
from trainer_batches import make_batch, save_tiny_model

from operators.trainer import fused_layers, learner
from operators.trainer.checked_kernels import checked
from operators.trainer.config import AlgorithmConfig, LearnerConfig
from operators.trainer.fused_layers import (
    LayerKernels,
    check_layer_kernels,
    fuse_layers,
    gated_by_torch,
    layer_kernels,
    rotate_by_torch,
)
from operators.trainer.learner import Learner

CPU = torch.device("cpu")
CONFIG = LearnerConfig(warmup_steps=0, micro_batch_tokens=64)
CALLS = Counter[str]()


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    CALLS["rotations"] += 1
    return rotate_by_torch(query, key, cos, sin)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    CALLS["gates"] += 1
    return gated_by_torch(gate, up)


KERNELS = LayerKernels(rotate, gated, "cpu")
FUSED = {
    **dict.fromkeys(("qwen2", "llama", "mistral"), (5, 2, 2)),
    **dict.fromkeys(("qwen3", "qwen3_wide", "qwen3_tied"), (9, 2, 2)),
    "gemma": (0, 0, 2),
    "gpt_neox": (0, 0, 0),
    "gpt2": (0, 0, 0),
    "qwen2_moe": (5, 2, 2),
    "qwen3_moe": (9, 0, 2),
    "olmoe": (9, 0, 2),
    "mixtral": (5, 0, 2),
}
"""The norms that two layers and their model have, and the gates and rotations that are called."""


@pytest.fixture(autouse=True)
def restored_families() -> Iterator[None]:
    """Give families that were changed their own functions back."""
    CALLS.clear()
    yield
    for module in list(sys.modules.values()):
        if isinstance(found := vars(module).get("apply_rotary_pos_emb"), fused_layers._Rotation):
            module.apply_rotary_pos_emb = found.plainly  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_fused_families_compute_what_they_computed(family: str) -> None:
    model = tiny_model(family)
    token_ids = torch.randint(0, 40, (1, 9), generator=torch.Generator().manual_seed(1))

    def compute() -> list[Tensor]:
        model.zero_grad()
        logits = model(input_ids=token_ids, use_cache=False).logits
        torch.autograd.backward(logits.square().mean())
        return [logits.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]

    expected = compute()
    fuse_layers(model, KERNELS)
    norms = sum("forward" in vars(module) and "Norm" in type(module).__name__ for module in model.modules())
    for one, other in zip(compute(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert (norms, CALLS["gates"], CALLS["rotations"]) == FUSED[family]


@pytest.mark.parametrize("algorithm", [AlgorithmConfig(), AlgorithmConfig(name="ppo", kl_coefficient=0.1)])
def test_fused_models_train_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: AlgorithmConfig) -> None:
    """The policy, the critic and the reference."""
    folder, config = save_tiny_model(tmp_path / "model"), replace(CONFIG, algorithm=algorithm)
    plain = Learner(config, folder)
    monkeypatch.setattr(learner, "layer_kernels", lambda device: KERNELS)
    fused = Learner(config, folder)
    before = CALLS["gates"]
    for number in range(2):
        one, other = (each.update(make_batch(number, number=number)) for each in (plain, fused))
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    assert CALLS["gates"] > before
    for model in (fused._policy, fused._critic, fused._reference):
        norms = [each for each in (model.modules() if model else ()) if "Norm" in type(each).__name__]
        assert all("forward" in vars(each) for each in norms)
    for each, same in zip(plain.model.parameters(), fused.model.parameters(), strict=True):
        torch.testing.assert_close(each, same, rtol=1e-4, atol=1e-6)


def test_what_takes_other_arguments_is_not_replaced() -> None:
    def other(query: Tensor) -> Tensor:
        return query

    assert not fused_layers._rotates(other)
    module = tiny_model().model.layers[0].mlp
    assert fused_layers._is_gated(module)
    assert not fused_layers._computes(other, SimpleNamespace(), torch.ones(1), torch.ones(1))
    del module._modules["up_proj"]
    assert not fused_layers._is_gated(module)


def test_tensors_elsewhere_are_computed_as_before() -> None:
    model = tiny_model()
    fuse_layers(model, KERNELS._replace(kind="meta"))
    model(input_ids=torch.arange(5)[None])
    assert not CALLS


def test_rows_of_a_batch_rotate_as_before() -> None:
    model = tiny_model()
    fuse_layers(model, KERNELS)
    model(input_ids=torch.arange(10).view(2, 5))
    assert (CALLS["rotations"], CALLS["gates"]) == (0, 2)


def test_a_second_model_of_a_family_is_fused_once() -> None:
    for _ in range(2):
        model = tiny_model()
        fuse_layers(model, KERNELS)
    rotation = sys.modules[type(model).__module__].apply_rotary_pos_emb  # type: ignore[attr-defined]
    assert not isinstance(rotation.plainly, fused_layers._Rotation)


def test_a_model_on_a_cpu_is_not_fused(tmp_path: Path) -> None:
    assert layer_kernels(CPU) is None
    trained = Learner(CONFIG, save_tiny_model(tmp_path / "model"))
    assert not [
        module for module in trained.model.modules() if "Norm" in type(module).__name__ and "forward" in vars(module)
    ]


def test_kernels_that_do_not_run_are_named(caplog: pytest.LogCaptureFixture) -> None:
    wrong = KERNELS._replace(gated=lambda gate, up: gate * up)
    with caplog.at_level(logging.WARNING):
        assert checked(lambda: wrong, lambda each: check_layer_kernels(each, CPU), "layers take longer") is None
    assert "layers take longer: RuntimeError: the gate differs from torch's by" in caplog.text


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (KERNELS._replace(gated=lambda gate, up: gate * up), "the gate differs"),
        (KERNELS._replace(rotate=lambda query, key, cos, sin: (query, key)), "the rotation differs"),
        (KERNELS._replace(gated=lambda gate, up: gated_by_torch(gate, up.detach())), "not have been used in the graph"),
    ],
)
def test_kernels_that_compute_something_else_are_found(changed: LayerKernels, expected: str) -> None:
    with pytest.raises(RuntimeError, match=expected):
        check_layer_kernels(changed, CPU)


COMPARISON = """
import torch
from operators.trainer.fused_layers import LayerKernels, check_layer_kernels, gated_by_torch, rotate_by_torch
from operators.trainer.layer_kernels import gated, rotate

check_layer_kernels(LayerKernels(rotate, gated, "cpu"), torch.device("cpu"))
source = torch.Generator().manual_seed(1)


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=source).to(dtype)


def compare(ours, by_torch, given, tolerance):
    found = []
    weights = None
    for compute in (ours, by_torch):
        leaves = [each.clone().requires_grad_() for each in given]
        outputs = compute(*leaves)
        weights = weights or [draw(*each.shape) for each in outputs]
        sum((each.float() * weight).sum() for each, weight in zip(outputs, weights)).backward()
        assert [each.dtype for each in outputs] == [each.dtype for each in given[: len(outputs)]]
        found.append([*(each.detach() for each in outputs), *(leaf.grad for leaf in leaves)])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 4e-2)):
    for heads, key_heads, tokens, size in ((12, 2, 5, 16), (3, 1, 7, 6), (4, 4, 1, 64)):
        table = draw(1, tokens, size), draw(1, tokens, size)
        for rows in (
            [draw(1, tokens, count, size, dtype=dtype).transpose(1, 2) for count in (heads, key_heads)],
            [draw(1, count, tokens, size, dtype=dtype) for count in (heads, key_heads)],
            [draw(1, count, size, tokens, dtype=dtype).mT for count in (heads, key_heads)],
        ):
            compare(lambda *pair: rotate(*pair, *table), lambda *pair: rotate_by_torch(*pair, *table), rows, tolerance)
    for shape in ((3, 7), (1, 5, 4097)):
        pair = [3 * draw(*shape, dtype=dtype) for _ in range(2)]
        compare(lambda *pair: (gated(*pair),), lambda *pair: (gated_by_torch(*pair),), pair, tolerance)
        turned = [each.mT for each in pair]
        compare(lambda *pair: (gated(*pair),), lambda *pair: (gated_by_torch(*pair),), turned, tolerance)
far = torch.tensor([-200.0, 200.0], requires_grad=True)
gated(far, torch.ones(2)).sum().backward()
assert torch.equal(far.grad, torch.tensor([0.0, 1.0])), far.grad
empty = torch.empty(0, 4, requires_grad=True)
gated(empty, empty).sum().backward()
none = torch.empty(1, 2, 0, 4, requires_grad=True)
rotate(none, none, torch.empty(1, 0, 4), torch.empty(1, 0, 4))[0].sum().backward()
print("equal")
"""


def test_layer_kernels_compute_what_torch_does() -> None:
    interpreted_kernels.assert_equal(COMPARISON)
