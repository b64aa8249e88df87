"""Splits a batch into micro-batches for forward and backward passes: length-sorted, in a token budget, unpadded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from infra.models.device_copies import on_device
from operators.trainer.batch import TrainingBatch
from operators.trainer.context_parallel import WHOLE, ContextGroup, ContextSlice, PredictorCounts, counts_in_slices
from operators.trainer.packed_attention import PackedLayout, lay_out
from operators.trainer.ranks import ALONE, Ranks


@dataclass(frozen=True, slots=True, eq=False)
class PackedTokens:
    """t input tokens and m tokens to predict. The last token of a sequence predicts nothing, so it is not an input.

    token_ids int64[1, t]; predictors int64[m], the positions whose hidden states predict `targets` int64[m];
    temperatures float32[m], by which the logits there are divided, None if all are 1. In a context group all are of
    this rank's slice of the tokens, and `counts` has the m of each rank.
    `host_predictors` int64[m] are a copy on the host, so that slicing does not wait for the GPU; None for a slice.
    """

    token_ids: Tensor
    layout: PackedLayout
    predictors: Tensor
    targets: Tensor
    temperatures: Tensor | None = None
    counts: PredictorCounts | None = None
    host_predictors: np.ndarray | None = None

    def gather(self, own: Tensor) -> Tensor:
        """The values of all predictors, of which `own` float[m] are this rank's."""
        return own if self.counts is None else self.counts.gather(own)

    def slice_for(self, context: ContextGroup) -> PackedTokens:
        """The slice of this rank of `context`."""
        if context.count == 1:
            return self
        part = ContextSlice(context, self.token_ids.shape[1])
        assert self.host_predictors is not None, "a slice has no slices"
        counts = counts_in_slices(self.host_predictors, part)
        first = sum(counts.counts[: context.rank])
        own = slice(first, first + counts.counts[context.rank])
        return PackedTokens(
            token_ids=part.local(self.token_ids),
            layout=replace(self.layout, positions=part.local(self.layout.positions), part=part),
            predictors=self.predictors[own] - part.begin,
            targets=self.targets[own],
            temperatures=None if self.temperatures is None else self.temperatures[own],
            counts=counts,
        )


@dataclass(frozen=True, slots=True, eq=False)
class TrainingMicroBatch:
    """Some sequences of a batch, with m trained tokens.

    behaviour float32[m] logprobs; segments int64[m], the sequence of each trained token among these `sequences`; places
    int64[m], its index among all trained tokens of the batch; rows int64[m], its sequence's index in the batch.
    """

    packed: PackedTokens
    behaviour: Tensor
    segments: Tensor
    places: Tensor
    rows: Tensor
    sequences: int

    def select_tokens(self, values: Tensor) -> Tensor:
        """Select from `values`, one per trained token of the batch: float32[m] on this device."""
        return on_device(values[self.places].float(), self.behaviour.device)

    def select_sequences(self, values: Tensor) -> Tensor:
        """Select from `values`, one per sequence of the batch, for each token: float32[m] on this device."""
        return on_device(values[self.rows].float(), self.behaviour.device)


def pack_tokens(
    token_ids: np.ndarray,
    loss_mask: np.ndarray,
    lengths: np.ndarray,
    device: torch.device,
    temperatures: np.ndarray | None = None,
) -> PackedTokens:
    """Pack contexts of `lengths` int64[n] and token_ids int64[t]; the tokens in loss_mask bool[t] are predicted.

    `temperatures` float32[n] are those of the contexts (None: 1). The first token of a context may not be in the mask:
    nothing predicts it.
    """
    kept = np.ones(len(token_ids), bool)
    kept[np.cumsum(lengths) - 1] = lengths == 1  # a blank micro-batch keeps its token: a model needs an input
    trained = np.flatnonzero(loss_mask)
    places = (np.cumsum(kept) - 1)[trained - 1]
    predictors = on_device(places, device)
    ids = on_device(token_ids[kept][None], device)
    targets = on_device(token_ids[trained], device)
    of_targets = None
    if temperatures is not None and (temperatures != 1).any():
        of_targets = on_device(np.repeat(temperatures, lengths)[loss_mask], device)
    layout = lay_out(np.maximum(lengths - 1, 1), device)
    return PackedTokens(ids, layout, predictors, targets, of_targets, host_predictors=places)


def plan_micro_batches(lengths: np.ndarray, rows: np.ndarray, token_budget: int) -> list[np.ndarray]:
    """Sort `rows` by descending length and split them into micro-batches of at most `token_budget` tokens.

    A row longer than the budget is a micro-batch of its own. The sort is stable, so the plan is deterministic.
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
    batch: TrainingBatch, rows: np.ndarray, device: torch.device, context: ContextGroup = WHOLE
) -> TrainingMicroBatch:
    """The micro-batch of the sequences `rows` of `batch`, on `device`; of the tokens `context`'s slice."""
    taken = _ranges(batch.starts[rows], batch.lengths[rows])
    loss_mask = batch.loss_mask[taken]
    trained, contexts = batch.trained[rows], batch.contexts[rows]
    lengths = batch.context_lengths[_ranges((np.cumsum(batch.contexts) - batch.contexts)[rows], contexts)]
    temperatures = np.repeat(batch.temperatures[rows], contexts)
    places = torch.from_numpy(_ranges((np.cumsum(batch.trained) - batch.trained)[rows], trained))
    return TrainingMicroBatch(
        packed=pack_tokens(batch.token_ids[taken], loss_mask, lengths, device, temperatures).slice_for(context),
        behaviour=on_device(batch.behaviour[taken][loss_mask], device),
        segments=on_device(np.repeat(np.arange(len(rows)), trained), device),
        places=places,
        rows=torch.from_numpy(np.repeat(rows, trained)),
        sequences=len(rows),
    )


def micro_batches(
    batch: TrainingBatch,
    rows: np.ndarray,
    token_budget: int,
    device: torch.device,
    ranks: Ranks = ALONE,
    context: ContextGroup = WHOLE,
) -> Iterator[TrainingMicroBatch]:
    """The micro-batches of `rows`, longest sequences first: too little memory shows with the first one.

    `token_budget` is that of each rank of `context`. Every rank yields the same number: blank micro-batches make up the
    difference. A collective.
    """
    plan = plan_micro_batches(batch.lengths, rows, token_budget * context.count)
    blanks = int(ranks.maximum(len(plan))) - len(plan)  # before the first pass: ranks call collectives in one order
    for part in plan:
        yield pack(batch, part, device, context)
    for _ in range(blanks):
        yield blank_micro_batch(device, context)


def blank_micro_batch(device: torch.device, context: ContextGroup = WHOLE) -> TrainingMicroBatch:
    """A micro-batch of one token that is not trained."""
    nothing = torch.zeros(0, dtype=torch.int64)
    return TrainingMicroBatch(
        packed=pack_tokens(np.zeros(1, np.int64), np.zeros(1, bool), np.ones(1, np.int64), device).slice_for(context),
        behaviour=torch.zeros(0, device=device),
        segments=nothing.to(device),
        places=nothing,
        rows=nothing,
        sequences=1,
    )


def mini_batches(groups: np.ndarray, count: int) -> list[np.ndarray]:
    """The sequences of each of at most `count` optimizer steps: whole groups in order, split evenly; none is empty.

    groups int64[n] are dense group numbers.
    """
    step = groups * count // (int(groups.max()) + 1)
    return [np.flatnonzero(step == number) for number in np.unique(step)]


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """starts[0], starts[0]+1, … (lengths[0] of them), starts[1], …"""
    ranges: np.ndarray = np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return ranges
