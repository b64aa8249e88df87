"""Layers whose operations by element run as few kernels on a GPU: norms by torch's own, rotary embeddings and gates by
those of `layer_kernels.py`.

On an H200 such operations are half of the kernels of an update (docs/benchmarks.md), and a third of its time there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from operators.trainer.checked_kernels import checked

Operation = Callable[[Tensor, Tensor], Sequence[Tensor]]
_ROTATE = "apply_rotary_pos_emb"
_PROJECTIONS = {"gate_proj", "up_proj", "down_proj"}


class LayerKernels(NamedTuple):
    """What kernels of a device of `kind` compute: `rotate_by_torch` and `gated_by_torch`."""

    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    gated: Callable[[Tensor, Tensor], Tensor]
    kind: str = "cuda"


def fuse_layers(model: nn.Module, kernels: LayerKernels | None) -> None:
    """Let the layers of `model` compute by `kernels`, if there are any, wherever they compute what those do.

    Queries and keys are rotated by a function of the model's family, which other models of the family in this process
    then call as well; tensors on other devices are computed as before.
    """
    if kernels is None:
        return
    for module in model.modules():
        if _is_norm(module):
            module.forward = _norm.__get__(module)
        elif _is_gated(module):
            module.forward = _with_gate(kernels).__get__(module)
    for family in {sys.modules[type(module).__module__] for module in model.modules()}:
        rotate = getattr(family, _ROTATE, None)
        if rotate is not None and not isinstance(rotate, _Rotation) and _rotates(rotate):
            setattr(family, _ROTATE, _Rotation(rotate, kernels))


@cache
def layer_kernels(device: torch.device) -> LayerKernels | None:
    """The kernels of `device`; None on a CPU, and with a warning on a GPU where they do not run."""
    if device.type != "cuda":
        return None
    without = "layers are computed by torch's operations, which take more time and memory"
    return checked(_load, lambda kernels: check_layer_kernels(kernels, device), without)


@torch.enable_grad()
def check_layer_kernels(kernels: LayerKernels, device: torch.device) -> None:
    """Raise RuntimeError if `kernels` do not compute what torch does, or other gradients."""
    source = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source).to(device)

    def compare(name: str, ours: Operation, by_torch: Operation, given: Sequence[Tensor]) -> None:
        for one, other in zip(_with_gradients(ours, given), _with_gradients(by_torch, given), strict=True):
            if not torch.allclose(one, other, rtol=1e-4, atol=1e-5):
                raise RuntimeError(f"the {name} differs from torch's by {float((one - other).abs().max()):.2g}")

    cos, sin = draw(1, 7, 6), draw(1, 7, 6)
    compare(
        "rotation",
        lambda query, key: kernels.rotate(query, key, cos, sin),
        lambda query, key: rotate_by_torch(query, key, cos, sin),
        [draw(1, 7, heads, 6).transpose(1, 2) for heads in (3, 1)],
    )
    compare(
        "gate",
        lambda gate, up: [kernels.gated(gate, up)],
        lambda gate, up: [gated_by_torch(gate, up)],
        [draw(5, 1000), draw(5, 1000)],
    )


def _with_gradients(compute: Operation, given: Sequence[Tensor]) -> list[Tensor]:
    """What `compute` makes of `given`, and the gradients of that."""
    leaves = [each.clone().requires_grad_() for each in given]
    outputs = compute(*leaves)
    gradients = torch.autograd.grad([each.square().sum() for each in outputs], leaves)
    return [*(each.detach() for each in outputs), *gradients]


def rotate_by_torch(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """A rotary embedding (arXiv 2104.09864) of `query` [1, h, t, d] and `key` [1, h_kv, t, d] by `cos` and `sin`
    [1, t, d]: x · cos + (-x₂, x₁) · sin, where x₁ and x₂ are the halves of a head."""

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return (x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]).to(x.dtype)

    return rotate(query), rotate(key)


def gated_by_torch(gate: Tensor, up: Tensor) -> Tensor:
    """silu(`gate`) · `up` (SwiGLU, arXiv 2002.05202)."""
    return functional.silu(gate) * up


def _load() -> LayerKernels:
    from operators.trainer.layer_kernels import gated, rotate

    return LayerKernels(rotate, gated)


class _Rotation:
    """A family's function that rotates queries and keys, by `kernels` where they can."""

    def __init__(self, plainly: Callable[..., Any], kernels: LayerKernels) -> None:
        self.plainly, self._kernels = plainly, kernels

    def __call__(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **options: Any) -> Any:
        one_row = query.dim() == 4 and len(query) == 1 and cos.shape == (1, *query.shape[2:])
        if args or options or not one_row or query.device.type != self._kernels.kind:
            return self.plainly(query, key, cos, sin, *args, **options)
        return self._kernels.rotate(query, key, cos, sin)


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    """torch has a kernel for a norm whose input and weight have one dtype."""
    dtype = torch.promote_types(hidden_states.dtype, self.weight.dtype)
    weight = self.weight.to(dtype)
    return functional.rms_norm(hidden_states.to(dtype), weight.shape, weight, self.variance_epsilon)


def _with_gate(kernels: LayerKernels) -> Any:
    def forward(self: Any, hidden_states: Tensor) -> Any:
        gate, up = self.gate_proj(hidden_states), self.up_proj(hidden_states)
        gated = kernels.gated if gate.device.type == kernels.kind else gated_by_torch
        return self.down_proj(gated(gate, up))

    return forward


def _is_norm(module: nn.Module) -> bool:
    """Whether `module` divides by the root of the mean square and multiplies by a weight."""
    shapes = {name: each.dim() for name, each in module.named_parameters()}
    epsilon = getattr(module, "variance_epsilon", None)
    if shapes != {"weight": 1} or not isinstance(epsilon, float):
        return False
    weight, some = torch.linspace(0.5, 2, 8), torch.linspace(-1, 3, 16).view(2, 8)
    expected = functional.rms_norm(some, weight.shape, weight, epsilon)
    return _computes(type(module).forward, SimpleNamespace(weight=weight, variance_epsilon=epsilon), some, expected)


def _is_gated(module: Any) -> bool:
    """Whether `module` is a gated MLP with the activation silu and nothing else."""
    if not module._modules.keys() >= _PROJECTIONS or not callable(activation := getattr(module, "act_fn", None)):
        return False
    gate, up, some = torch.linspace(-1, 1, 8), torch.linspace(2, 1, 8), torch.linspace(-4, 4, 16).view(2, 8)
    parts = SimpleNamespace(gate_proj=gate.mul, up_proj=up.mul, down_proj=torch.cos, act_fn=activation)
    expected = torch.cos(gated_by_torch(gate * some, up * some))
    return _computes(type(module).forward, parts, some, expected)


def _computes(forward: Callable[..., Any], parts: SimpleNamespace, some: Tensor, expected: Tensor) -> bool:
    """Whether a class's `forward` makes `expected` of `some`, by a module that has `parts` alone."""
    try:
        found = forward(parts, some)
    except Exception:  # noqa: BLE001 - it needs other parts or arguments
        return False
    return isinstance(found, Tensor) and torch.allclose(found, expected, atol=1e-6)


def _rotates(rotate: Callable[..., Any]) -> bool:
    """Whether a family's function computes what `rotate_by_torch` does."""
    query, key = torch.linspace(-1, 2, 48).view(1, 2, 3, 8), torch.linspace(1, 3, 24).view(1, 1, 3, 8)
    table = torch.linspace(-1, 1, 24).view(1, 3, 8), torch.linspace(0, 1, 24).view(1, 3, 8)
    try:
        found = rotate(query, key, *table)
    except Exception:  # noqa: BLE001 - it takes other arguments
        return False
    return all(
        torch.allclose(*pair, atol=1e-6) for pair in zip(found, rotate_by_torch(query, key, *table), strict=True)
    )
