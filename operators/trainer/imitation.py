"""Supervised training on packed examples: what the warm start does between its measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from operators.trainer.muon import Muon
from operators.trainer.packed_attention import PACKED
from operators.trainer.packing import pack_tokens
from operators.trainer.policy import token_logprobs

_ALL_LOGITS = 1 << 30
_GRADIENT_NORM = 1.0


class Example(NamedTuple):
    """Token ids of a question and of the answer to imitate, its end included."""

    prompt: list[int]
    answer: list[int]


class LearningRates(NamedTuple):
    """Peak learning rates: of embeddings, norms and biases, which learn by AdamW, and of matrices, which learn by
    Muon.
    """

    vectors: float
    matrices: float


def imitate(
    model: PreTrainedModel,
    examples: Sequence[Example],
    *,
    steps: int,
    batch: int,
    rates: LearningRates,
    warmup: int,
    seed: int,
    after: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """`steps` updates of `model` on `batch` examples each: the mean cross-entropy of answer tokens, in nats.

    Muon (Jordan et al., 2024) reaches the accuracy of AdamW in half its updates here. Rates rise over `warmup`
    updates and fall linearly to 0. `after(step, loss)` is called after each update, counted from 1, and may use the
    model as it likes. Deterministic by `seed` at a fixed number of threads.
    """
    optimizers = _optimizers(model, rates)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    batches = _draw(examples, batch, seed)
    for step in range(steps):
        model.set_attn_implementation(PACKED)  # `after` may have needed another
        factor = scheduled(step, steps, warmup)
        for optimizer, own in zip(optimizers, peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, own, strict=True):
                group["lr"] = peak * factor
        loss = _loss(model, next(batches))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), _GRADIENT_NORM)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        after(step + 1, loss.item())


def scheduled(step: int, steps: int, warmup: int) -> float:
    """The factor of the learning rates at update `step`, counted from 0: a linear rise, then a line down to 0."""
    return min(1.0, (step + 1) / max(1, warmup)) * (1 - step / steps)


def _optimizers(model: PreTrainedModel, rates: LearningRates) -> list[torch.optim.Optimizer]:
    embeddings = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in embeddings]
    vectors = [p for p in model.parameters() if p.ndim != 2 or id(p) in embeddings]
    return [
        Muon(matrices, rates.matrices),
        torch.optim.AdamW(vectors, lr=rates.vectors, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def _draw(examples: Sequence[Example], batch: int, seed: int) -> Iterator[list[Example]]:
    """Batches without end; each epoch has every example once, in an order of its own."""
    order = np.random.default_rng(seed)
    waiting = np.empty(0, np.int64)
    while True:
        while len(waiting) < batch:
            waiting = np.concatenate([waiting, order.permutation(len(examples))])
        drawn, waiting = waiting[:batch], waiting[batch:]
        yield [examples[index] for index in drawn]


def _loss(model: PreTrainedModel, rows: Sequence[Example]) -> torch.Tensor:
    token_ids = np.concatenate([np.array(row.prompt + row.answer) for row in rows])
    answers = np.concatenate([np.repeat([False, True], [len(row.prompt), len(row.answer)]) for row in rows])
    lengths = np.array([len(row.prompt) + len(row.answer) for row in rows])
    logprobs, _ = token_logprobs(model, pack_tokens(token_ids, answers, lengths, model.device), _ALL_LOGITS)
    return -logprobs.mean()
