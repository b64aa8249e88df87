"""Metadata of every sequence of a global batch, known to every rank; tokens stay on their own rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from operators.trainer.batch import TrainingBatch
from operators.trainer.context_parallel import ContextGroup
from operators.trainer.ranks import Ranks
from schemas.records import MicroBatch


@dataclass(frozen=True, slots=True, eq=False)
class GlobalBatchMetadata:
    """n sequences in rank order: rewards float64[n]; groups (numbered in the order of training), lengths,
    prompt_lengths, trained and staleness int64[n]; truncated bool[n], whether a length limit cut the response off.
    Their c contexts in the same order: `sequences` int64[c], the sequence of each, context_rewards float64[c],
    context_trained int64[c].

    `rows` is this rank's slice of the sequences, `tokens` its slice of their trained tokens.
    """

    rewards: np.ndarray
    groups: np.ndarray
    lengths: np.ndarray
    prompt_lengths: np.ndarray
    trained: np.ndarray
    staleness: np.ndarray
    truncated: np.ndarray
    sequences: np.ndarray
    context_rewards: np.ndarray
    context_trained: np.ndarray
    rows: slice
    tokens: slice

    def __len__(self) -> int:
        return len(self.rewards)


def gather_rows(rows: Sequence[MicroBatch], context: ContextGroup) -> list[Sequence[MicroBatch]]:
    """The parts of the global batch on each rank of a context group, `rows` on this one. A collective."""
    if context.count == 1:
        return [rows]
    from schemas.codec import decode, encode, record_type  # the GPU check trains without the packages of the codec

    values = [encode(part)[0] for part in rows]
    headers = (("laminar-schema", record_type(MicroBatch).schema.encode()),)
    sizes = context.gather_bytes(np.array([len(value) for value in values], np.int64).tobytes())
    found: list[Sequence[MicroBatch]] = []
    for data, of_parts in zip(context.gather_bytes(b"".join(values)), sizes, strict=True):
        ends = np.cumsum(np.frombuffer(of_parts, np.int64)).tolist()
        found.append([decode(data[begin:end], headers)[0] for begin, end in zip([0, *ends], ends, strict=False)])
    return found


def gather_metadata(batch: TrainingBatch, ranks: Ranks) -> GlobalBatchMetadata:
    """The metadata of the global batch; `batch` is this rank's part. A collective: every rank must call it."""
    columns = (
        *(batch.group_keys, batch.lengths, batch.prompt_lengths, batch.trained),
        *(batch.staleness, batch.truncated, batch.contexts, batch.shares),
    )
    table = torch.from_numpy(np.stack([column.astype(np.int64) for column in columns], 1))
    parts = ranks.gather(table)
    keys, lengths, prompt_lengths, trained, staleness, truncated, contexts, shares = torch.cat(parts).numpy().T
    before = parts[: ranks.rank]
    rows, tokens = sum(map(len, before)), sum(int(part[:, 3].sum()) for part in before)
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    rewards, context_rewards, context_trained = (
        torch.cat(ranks.gather(torch.from_numpy(column))).numpy()
        for column in (batch.rewards, batch.context_rewards, batch.context_trained)
    )
    return GlobalBatchMetadata(
        rewards=rewards,
        groups=_number(first, shares[first])[inverse],
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        trained=trained,
        staleness=staleness,
        truncated=truncated.astype(bool),
        sequences=np.repeat(np.arange(len(keys)), contexts),
        context_rewards=context_rewards,
        context_trained=context_trained,
        rows=slice(rows, rows + len(batch)),
        tokens=slice(tokens, tokens + int(batch.trained.sum())),
    )


def _number(first: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """The number of each group by where it occurs `first` and in which of `shares`, both int64[n].

    Shares take turns: groups with successive numbers, the mini-batches, are in all of them. The numbers depend on the
    batch's records alone, so any number of ranks has the same mini-batches.
    """
    order = np.lexsort((first, shares))
    of = shares[order]
    counts = np.bincount(of)
    places = np.arange(len(of)) - (np.cumsum(counts) - counts)[of]
    turns = order[np.argsort((places + 0.5) / counts[of], kind="stable")]
    numbers = np.empty(len(of), np.int64)
    numbers[turns] = np.arange(len(of))
    return numbers
