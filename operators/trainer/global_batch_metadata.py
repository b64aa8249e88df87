"""Metadata of every sequence of a global batch, known to every rank; tokens stay on their own rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from operators.trainer.batch import TrainingBatch
from operators.trainer.ranks import Ranks


@dataclass(frozen=True, slots=True, eq=False)
class GlobalBatchMetadata:
    """n sequences in rank order: rewards float64[n]; groups (dense numbers), lengths, prompt_lengths, trained and
    staleness int64[n]; truncated bool[n], whether a length limit cut the response off.

    `rows` is this rank's slice of the sequences, `tokens` its slice of their trained tokens.
    """

    rewards: np.ndarray
    groups: np.ndarray
    lengths: np.ndarray
    prompt_lengths: np.ndarray
    trained: np.ndarray
    staleness: np.ndarray
    truncated: np.ndarray
    rows: slice
    tokens: slice

    def __len__(self) -> int:
        return len(self.rewards)


def gather_metadata(batch: TrainingBatch, ranks: Ranks) -> GlobalBatchMetadata:
    """The metadata of the global batch; `batch` is this rank's part. A collective: every rank must call it."""
    columns = (batch.group_keys, batch.lengths, batch.prompt_lengths, batch.trained, batch.staleness, batch.truncated)
    table = torch.from_numpy(np.stack([column.astype(np.int64) for column in columns], 1))
    parts = ranks.gather(table)
    keys, lengths, prompt_lengths, trained, staleness, truncated = torch.cat(parts).numpy().T
    before = parts[: ranks.rank]
    rows, tokens = sum(map(len, before)), sum(int(part[:, 3].sum()) for part in before)
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    return GlobalBatchMetadata(
        rewards=torch.cat(ranks.gather(torch.from_numpy(batch.rewards))).numpy(),
        groups=np.argsort(np.argsort(first))[inverse],  # numbered by first occurrence
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        trained=trained,
        staleness=staleness,
        truncated=truncated.astype(bool),
        rows=slice(rows, rows + len(batch)),
        tokens=slice(tokens, tokens + int(batch.trained.sum())),
    )
