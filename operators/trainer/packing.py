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
from operators.trainer.ranks import ALONE, Ranks


@dataclass(frozen=True, slots=True, eq=False)
class PackedTokens:
    """t tokens of sequences, and m to be predicted from them. The last token of a sequence predicts nothing, so it is
    not among the t.

    token_ids int64[1, t]; predictors int64[m], the places whose hidden states predict `targets` int64[m]; temperatures
    float32[m], by which logits are divided there, None where all are 1.
    """

    token_ids: Tensor
    layout: PackedLayout
    predictors: Tensor
    targets: Tensor
    temperatures: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TrainingMicroBatch:
    """Some sequences of a batch, with m trained tokens.

    behaviour float32[m] logprobs; segments int64[m], which of the `sequences` a trained token is of; places int64[m],
    where it stands among all trained tokens of the batch; rows int64[m], its sequence's number in the batch.
    """

    packed: PackedTokens
    behaviour: Tensor
    segments: Tensor
    places: Tensor
    rows: Tensor
    sequences: int

    def of_tokens(self, values: Tensor) -> Tensor:
        """What `values`, one a trained token of the batch, has for these, float32[m] where this lies."""
        return values[self.places].float().to(self.behaviour.device)

    def of_sequences(self, values: Tensor) -> Tensor:
        """What `values`, one a sequence of the batch, has for each of these tokens, float32[m] where this lies."""
        return values[self.rows].float().to(self.behaviour.device)


def pack_tokens(
    token_ids: np.ndarray,
    loss_mask: np.ndarray,
    lengths: np.ndarray,
    device: torch.device,
    temperatures: np.ndarray | None = None,
) -> PackedTokens:
    """The packed sequences of `lengths` int64[n], token_ids int64[t], whose tokens under loss_mask bool[t] are
    predicted, at `temperatures` float32[n] (None: at 1).

    No sequence may have its first token under the mask: nothing predicts it.
    """
    kept = np.ones(len(token_ids), bool)
    kept[np.cumsum(lengths) - 1] = lengths == 1  # but of a blank micro-batch: a model wants a token
    trained = np.flatnonzero(loss_mask)
    predictors = torch.from_numpy((np.cumsum(kept) - 1)[trained - 1]).to(device)
    ids = torch.from_numpy(token_ids[kept])[None].to(device)
    targets = torch.from_numpy(token_ids[trained]).to(device)
    of_targets = None
    if temperatures is not None and (temperatures != 1).any():
        of_targets = torch.from_numpy(np.repeat(temperatures, lengths)[loss_mask]).to(device)
    return PackedTokens(ids, lay_out(np.maximum(lengths - 1, 1), device), predictors, targets, of_targets)


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


def pack(batch: TrainingBatch, rows: np.ndarray, device: torch.device) -> TrainingMicroBatch:
    """The sequences `rows` of `batch`, on `device`."""
    taken = _ranges(batch.starts[rows], batch.lengths[rows])
    loss_mask = batch.loss_mask[taken]
    trained = batch.trained[rows]
    places = torch.from_numpy(_ranges((np.cumsum(batch.trained) - batch.trained)[rows], trained))
    return TrainingMicroBatch(
        packed=pack_tokens(batch.token_ids[taken], loss_mask, batch.lengths[rows], device, batch.temperatures[rows]),
        behaviour=torch.from_numpy(batch.behaviour[taken][loss_mask]).to(device),
        segments=torch.from_numpy(np.repeat(np.arange(len(rows)), trained)).to(device),
        places=places,
        rows=torch.from_numpy(np.repeat(rows, trained)),
        sequences=len(rows),
    )


def micro_batches(
    batch: TrainingBatch, rows: np.ndarray, token_budget: int, device: torch.device, ranks: Ranks = ALONE
) -> Iterator[TrainingMicroBatch]:
    """The micro-batches of `rows`, longest sequences first: if memory does not suffice, the first one says so.

    Every rank gives the same number: where others have more, blank ones follow.
    """
    plan = plan_micro_batches(batch.lengths, rows, token_budget)
    blanks = int(ranks.maximum(len(plan))) - len(plan)  # asked before the first pass: ranks must ask in one order
    for part in plan:
        yield pack(batch, part, device)
    for _ in range(blanks):
        yield blank(device)


def blank(device: torch.device) -> TrainingMicroBatch:
    """A micro-batch of one token, which is not trained."""
    nothing = torch.zeros(0, dtype=torch.int64)
    return TrainingMicroBatch(
        packed=pack_tokens(np.zeros(1, np.int64), np.zeros(1, bool), np.ones(1, np.int64), device),
        behaviour=torch.zeros(0, device=device),
        segments=nothing.to(device),
        places=nothing,
        rows=nothing,
        sequences=1,
    )


def mini_batches(groups: np.ndarray, count: int) -> list[np.ndarray]:
    """The sequences of each of at most `count` optimizer steps: whole groups in their order, evenly; none is empty.

    groups int64[n] are dense numbers.
    """
    step = groups * count // (int(groups.max()) + 1)
    return [np.flatnonzero(step == number) for number in np.unique(step)]


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """starts[0], starts[0]+1, … (lengths[0] of them), starts[1], …"""
    ranges: np.ndarray = np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return ranges
