"""Logprobs, entropies and gradients of tokens from logits: the kernels beside torch's operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.figures import Figure, seconds
from benchmarks.gpu.settings import Settings
from operators.trainer.token_scores import has_kernels, scores_by_torch, token_scores

Score = Callable[..., tuple[Tensor, Tensor]]


def scores(settings: Settings, model: Path) -> list[Figure]:
    """Milliseconds to score half a micro-batch's tokens, forward and backward."""
    rows, vocabulary = settings.micro_batch_tokens // 2, int(settings.shape.config["vocab_size"])
    device = torch.device(settings.device)
    logits = torch.randn(rows, vocabulary, device=device, dtype=torch.bfloat16, requires_grad=True)
    targets, gradient = torch.randint(0, vocabulary, (rows,), device=device), torch.randn(rows, device=device)

    def took(score: Score) -> float:
        def run() -> None:
            logits.grad = None
            logprobs, _ = score(logits, targets, None, with_entropy=True)
            torch.autograd.backward(logprobs, gradient)

        return 1e3 * seconds(settings.device, run, 5, 2)

    by_torch = Figure("scored by torch", took(scores_by_torch), "ms", note=f"{rows:,} rows of {vocabulary:,} logits")
    if not has_kernels(device):
        return [by_torch, Figure("scored by kernels", math.nan, "ms", note="no kernels run on this device")]
    by_kernels = took(token_scores)
    return [
        by_torch,
        Figure("scored by kernels", by_kernels, "ms"),
        Figure("kernels over torch", by_kernels / by_torch.value, "", ("<=", 0.5)),
    ]
