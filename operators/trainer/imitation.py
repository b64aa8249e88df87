"""Imitation learning for the warm start: supervised training on packed examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from operators.trainer.packed_attention import PACKED
from operators.trainer.packing import pack_tokens
from operators.trainer.policy import token_logprobs

_ALL_LOGITS = 1 << 30
_GRADIENT_NORM = 1.0


class Example(NamedTuple):
    """Token ids of a question and of the answer to imitate, including its end token."""

    prompt: list[int]
    answer: list[int]


class LearningRates(NamedTuple):
    """Peak learning rates: `vectors` for embeddings, norms and biases (AdamW), `matrices` for all others (Muon)."""

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
    """Train `model` in `steps` updates of `batch` examples; the loss is the mean cross-entropy of answer tokens, nats.

    Muon (Jordan et al., 2024) reaches the accuracy of AdamW in half the updates here. Rates rise over `warmup` updates,
    then fall linearly to 0. `after(step, loss)` is called after each update, counted from 1; it may change the model's
    attention implementation. Deterministic by `seed` at a fixed number of threads. Raises ValueError without examples.
    """
    if not examples:
        raise ValueError("there are no examples to imitate")
    optimizers = _optimizers(model, rates)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    batches = _draw(examples, batch, seed)
    for step in range(steps):
        model.set_attn_implementation(PACKED)  # `after` may have set another
        factor = scheduled(step, steps, warmup)
        for optimizer, peaks_of_groups in zip(optimizers, peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks_of_groups, strict=True):
                group["lr"] = peak * factor
        loss = _loss(model, next(batches))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), _GRADIENT_NORM)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        after(step + 1, loss.item())


def scheduled(step: int, steps: int, warmup: int) -> float:
    """The learning-rate factor at update `step`, counted from 0: linear warm-up, then linear decay to 0."""
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
    """An endless iterator of batches; each epoch contains every example once, in a new order."""
    order = np.random.default_rng(seed)
    remaining = np.empty(0, np.int64)
    while True:
        while len(remaining) < batch:
            remaining = np.concatenate([remaining, order.permutation(len(examples))])
        drawn, remaining = remaining[:batch], remaining[batch:]
        yield [examples[index] for index in drawn]


def _loss(model: PreTrainedModel, rows: Sequence[Example]) -> torch.Tensor:
    token_ids = np.concatenate([np.array(row.prompt + row.answer) for row in rows])
    answers = np.concatenate([np.repeat([False, True], [len(row.prompt), len(row.answer)]) for row in rows])
    lengths = np.array([len(row.prompt) + len(row.answer) for row in rows])
    logprobs, _ = token_logprobs(model, pack_tokens(token_ids, answers, lengths, model.device), _ALL_LOGITS)
    return -logprobs.mean()


_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_MOMENTUM = 0.95


class Muon(torch.optim.Optimizer):
    """Orthogonalised Nesterov momentum of matrices. Learning rates are comparable with AdamW's for every shape: updates
    are scaled to a root mean square of 0.2 (Liu et al., 2025).

    Jordan et al., 2024, in float32: torch.optim.Muon iterates in bfloat16, and a CPU without bfloat16 instructions
    emulates it fourteen times slower.
    """

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for matrix in (p for p in group["params"] if p.grad is not None):
                state = self.state[matrix]
                if not state:
                    state["momentum"] = torch.zeros_like(matrix)
                average = state["momentum"].lerp_(matrix.grad, 1 - _MOMENTUM)
                ahead = matrix.grad.lerp(average, _MOMENTUM)
                matrix.add_(orthogonalised(ahead), alpha=-group["lr"] * 0.2 * max(matrix.shape) ** 0.5)


def orthogonalised(matrix: Tensor) -> Tensor:
    """`matrix` [rows, columns] with its singular values moved to between 0.7 and 1.2 by a quintic iteration."""
    a, b, c = _COEFFICIENTS
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(_ITERATIONS):
        gram = wide @ wide.mT
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.mT
