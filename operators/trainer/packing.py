"""From a batch to the micro-batches of forward and backward passes: length-sorted, within a token budget, without
padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from operators.trainer.batch import TrainingBatch
from operators.trainer.packed_attention import PackedLayout, lay_out


@dataclass(frozen=True, slots=True, eq=False)
class PackedTokens:
    """t tokens of whole sequences, of which m are to be predicted.

    token_ids int64[1, t]; predictors int64[m], the places whose hidden states predict `targets` int64[m].
    """

    token_ids: Tensor
    layout: PackedLayout
    predictors: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TrainingMicroBatch:
    """Some sequences of a batch and what their m trained tokens need.

    behaviour float32[m] logprobs; advantages and coefficients float32[m]; segments int64[m], which of the `sequences` a
    trained token is of; places int64[m], where it stands among all trained tokens of the batch.
    """

    packed: PackedTokens
    behaviour: Tensor
    advantages: Tensor
    coefficients: Tensor
    segments: Tensor
    places: Tensor
    sequences: int


def pack_tokens(
    token_ids: np.ndarray, loss_mask: np.ndarray, lengths: np.ndarray, device: torch.device
) -> PackedTokens:
    """The packed sequences of `lengths` int64[n], token_ids int64[t], whose tokens under loss_mask bool[t] are
    predicted.

    No sequence may have its first token under the mask: nothing predicts it.
    """
    trained = torch.from_numpy(np.flatnonzero(loss_mask)).to(device)
    ids = torch.from_numpy(token_ids).to(device)
    return PackedTokens(ids[None], lay_out(lengths).to(device), trained - 1, ids[trained])


def plan_micro_batches(lengths: np.ndarray, rows: np.ndarray, token_budget: int) -> list[np.ndarray]:
    """`rows` sorted by descending length and cut where the next would take a micro-batch beyond `token_budget` tokens.

    A row longer than the budget is alone. Equal lengths keep their order, so the plan is a function of its arguments.
    """
    order = rows[np.argsort(-lengths[rows], kind="stable")]
    plan: list[list[int]] = []
    tokens = 0
    for row in order:
        if not plan or tokens + lengths[row] > token_budget:
            plan.append([])
            tokens = 0
        plan[-1].append(int(row))
        tokens += int(lengths[row])
    return [np.array(rows, np.int64) for rows in plan]


def pack(
    batch: TrainingBatch, rows: np.ndarray, advantages: Tensor, coefficients: Tensor, device: torch.device
) -> TrainingMicroBatch:
    """The sequences `rows` of `batch`, with `advantages` of all its trained tokens and `coefficients` of all its
    sequences.
    """
    taken = _ranges(batch.starts[rows], batch.lengths[rows])
    loss_mask = batch.loss_mask[taken]
    trained = batch.trained[rows]
    places = torch.from_numpy(_ranges((np.cumsum(batch.trained) - batch.trained)[rows], trained))
    segments = torch.from_numpy(np.repeat(np.arange(len(rows)), trained))
    return TrainingMicroBatch(
        packed=pack_tokens(batch.token_ids[taken], loss_mask, batch.lengths[rows], device),
        behaviour=torch.from_numpy(batch.behaviour[taken][loss_mask]).to(device),
        advantages=advantages[places].float().to(device),
        coefficients=coefficients[torch.from_numpy(rows)][segments].float().to(device),
        segments=segments.to(device),
        places=places,
        sequences=len(rows),
    )


def micro_batches(
    batch: TrainingBatch,
    rows: np.ndarray,
    advantages: Tensor,
    coefficients: Tensor,
    token_budget: int,
    device: torch.device,
) -> Iterator[TrainingMicroBatch]:
    """The micro-batches of `rows`, longest sequences first: if memory does not suffice, the first one says so."""
    for part in plan_micro_batches(batch.lengths, rows, token_budget):
        yield pack(batch, part, advantages, coefficients, device)


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """starts[0], starts[0]+1, … (lengths[0] of them), starts[1], …"""
    ranges: np.ndarray = np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return ranges
