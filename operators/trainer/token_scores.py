"""Logprobs and entropies of tokens from logits, by torch on a CPU and by kernels of their own on a GPU.

torch's log-softmax, exponential, product and sum each read and write float32 tensors of the size of the logits. The
kernels (`score_kernels.py`) read the logits once forward, and once backward, where they write the gradient alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from operators.trainer.checked_kernels import checked

Score = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


def token_scores(
    logits: Tensor, targets: Tensor, temperatures: Tensor | None, *, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Logprobs in nats of `targets` int64[m], float32[m] with gradient, and entropies, float32[m] without one.

    Both are of the softmax in float32 of `logits` [m, vocabulary] / `temperatures` float32[m] (None: 1). Entropies are
    empty unless `with_entropy`.
    """
    score = _kernels(logits.device) if logits.is_cuda else None
    if score is None:
        return scores_by_torch(logits, targets, temperatures, with_entropy=with_entropy)
    logprobs, entropies = score(logits, targets, temperatures)
    return logprobs, entropies if with_entropy else entropies[:0]


def has_kernels(device: torch.device) -> bool:
    """Whether the kernels run on `device`."""
    return device.type == "cuda" and _kernels(device) is not None


def scores_by_torch(
    logits: Tensor, targets: Tensor, temperatures: Tensor | None, *, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """`token_scores` by torch's own operations."""
    logits = logits.float()
    if temperatures is not None:
        logits = logits / temperatures[:, None]
    logprobs = logits.log_softmax(-1)
    entropies = logprobs.new_empty(0)
    if with_entropy:
        with torch.no_grad():
            entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropies


@cache
def _kernels(device: torch.device) -> Score | None:
    """The kernels, once they have given torch's results on `device`; None, and a warning, if they do not run there."""
    without = "tokens are scored by torch's operations, which take more time and memory"
    return checked(_load, lambda score: check_scores(score, device), without)


def _load() -> Score:
    from operators.trainer.score_kernels import scores_by_kernels

    return scores_by_kernels


@torch.enable_grad()
def check_scores(score: Score, device: torch.device) -> None:
    """Raise RuntimeError if `score` does not compute what torch does."""
    source = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 5000, generator=source).to(device)
    targets = torch.tensor([0, 17, 4095, 4999], device=device)
    temperatures = torch.tensor([1, 0.5, 2, 1], device=device)
    found: list[tuple[Tensor, ...]] = []
    for each in (score, lambda *given: scores_by_torch(*given, with_entropy=True)):
        leaf = logits.clone().requires_grad_()
        logprobs, entropies = each(leaf, targets, temperatures)
        torch.autograd.backward(logprobs.sum())
        assert leaf.grad is not None
        found.append((logprobs.detach(), entropies, leaf.grad))
    for name, one, other in zip(("logprobs", "entropies", "gradients"), *found, strict=True):
        if not torch.allclose(one, other, rtol=1e-4, atol=1e-5):
            raise RuntimeError(f"the kernels' {name} differ from torch's by {float((one - other).abs().max()):.2g}")
