"""Triton kernels of `token_scores`: one pass over a row of logits forward, and one over all of them backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_WARPS = 8


def scores_by_kernels(logits: Tensor, targets: Tensor, temperatures: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logprobs of `targets` with gradient, and entropies, of `logits` [m, vocabulary] / `temperatures`: float32[m]."""
    scored: tuple[Tensor, Tensor] = _Scores.apply(logits, targets, temperatures)
    return scored


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperatures: Tensor | None) -> tuple[Tensor, Tensor]:
        rows, vocabulary = logits.shape
        logits = logits.contiguous()
        logprobs, entropies, normalisers = (logits.new_empty(rows, dtype=torch.float32) for _ in range(3))
        if rows:
            _score[(rows,)](
                *(logits, targets, temperatures, logprobs, entropies, normalisers, vocabulary),
                tempered=temperatures is not None,
                block=_BLOCK,
                num_warps=_WARPS,
            )
        ctx.save_for_backward(logits, targets, temperatures, normalisers)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, temperatures, normalisers = ctx.saved_tensors
        rows, vocabulary = logits.shape
        of_logits = torch.empty_like(logits)
        if rows:
            _score_gradient[(rows, triton.cdiv(vocabulary, _BLOCK))](
                *(logits, targets, temperatures, normalisers, gradient.contiguous(), of_logits, vocabulary),
                tempered=temperatures is not None,
                block=_BLOCK,
                num_warps=_WARPS,
            )
        return of_logits, None, None


@triton.jit
def _score(  # type: ignore[no-untyped-def]
    logits,
    targets,
    temperatures,
    logprobs,
    entropies,
    normalisers,
    vocabulary,
    tempered: tl.constexpr,
    block: tl.constexpr,
):
    """One row: `total` is the sum of exp(x - highest), `moment` that of exp(x - highest)·(x - highest)."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row) if tempered else 1.0
    highest, total, moment = -3.0e38, 0.0, 0.0  # finite, so that no difference of two of it is NaN
    for first in range(0, vocabulary, block):
        column = first + tl.arange(0, block)
        x = tl.load(logits + row * vocabulary + column, mask=column < vocabulary, other=-float("inf")).to(tl.float32)
        x = x / temperature
        higher = tl.maximum(highest, tl.max(x, 0))
        weights = tl.exp(x - higher)
        kept = tl.exp(highest - higher)
        moments = tl.where(weights > 0, weights * (x - higher), 0.0)
        moment = kept * (moment + total * (highest - higher)) + tl.sum(moments, 0)
        total = kept * total + tl.sum(weights, 0)
        highest = higher
    normaliser = highest + tl.log(total)
    target = tl.load(logits + row * vocabulary + tl.load(targets + row)).to(tl.float32) / temperature
    tl.store(logprobs + row, target - normaliser)
    tl.store(entropies + row, tl.log(total) - moment / total)
    tl.store(normalisers + row, normaliser)


@triton.jit
def _score_gradient(  # type: ignore[no-untyped-def]
    logits,
    targets,
    temperatures,
    normalisers,
    gradients,
    of_logits,
    vocabulary,
    tempered: tl.constexpr,
    block: tl.constexpr,
):
    """One block of one row: gradient · (1[target] - softmax) / temperature."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    temperature = tl.load(temperatures + row) if tempered else 1.0
    x = tl.load(logits + row * vocabulary + column, mask=column < vocabulary, other=-float("inf")).to(tl.float32)
    share = tl.exp(x / temperature - tl.load(normalisers + row))
    hit = tl.where(column == tl.load(targets + row), 1.0, 0.0)
    gradient = tl.load(gradients + row) / temperature * (hit - share)
    tl.store(of_logits + row * vocabulary + column, gradient, mask=column < vocabulary)
