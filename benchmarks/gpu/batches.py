"""Training batches for the learner, made without pyarrow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from schemas.identity import trajectory_id
from schemas.records import MicroBatch, PolicyVersion

GROUP = 4
IMPORTED = PolicyVersion(0, 0)


def batch_of(sequences: int, length: int, vocabulary: int, first: int = 0) -> MicroBatch:
    """A batch of sequences of `length` random tokens, half of them trained, in groups whose rewards differ, or the part
    of one from sequence `first` on.

    Its logprobs are those of a model that finds all tokens of the vocabulary equally likely.
    """
    drawn = np.random.default_rng(0).integers(1, 500, (sequences, length))
    logprobs = np.where(np.arange(length) >= length // 2, -np.log(vocabulary), 0.0)
    return training_batch(drawn, length // 2, [logprobs] * sequences, np.tile([0.0, 1.0], sequences // 2), first=first)


def training_batch(
    token_ids: Sequence[np.ndarray] | np.ndarray,
    prompt: int,
    logprobs: Sequence[np.ndarray],
    rewards: np.ndarray,
    version: PolicyVersion = IMPORTED,
    first: int = 0,
    group: int = GROUP,
) -> MicroBatch:
    """A batch of sequences with prompts of `prompt` tokens, in groups of `group`, that `version` generated; the batch
    changes the weights of `version`. `logprobs` include the prompts'. Without those before `first` it is a rank's part.
    """
    count, lengths = len(token_ids), np.array([len(each) for each in token_ids])
    zeros = np.zeros(count, np.int64)
    values: dict[str, Any] = {
        "token_ids": np.concatenate(token_ids).astype(np.int32),
        "logprobs": np.concatenate(logprobs).astype(np.float32),
        "loss_mask": np.concatenate([np.arange(length) >= prompt for length in lengths]),
        "lengths": lengths,
        "prompt_lengths": np.full(count, prompt),
        "rewards": rewards,
        "temperatures": np.ones(count, np.float32),
        "truncated": zeros.astype(bool),
        "version_epochs": zeros + version.epoch,
        "version_numbers": zeros + version.number,
        **dict.fromkeys(("staleness", "lineage_partitions", "lineage_offsets"), zeros),
        "breaks": np.empty(0, np.int64),
        "context_rewards": np.empty(0, np.float32),
    }
    columns: dict[str, Any] = {name: _Column(each) for name, each in values.items()}
    names = tuple(trajectory_id("train", i // group, i % group) for i in range(first, first + count))
    return MicroBatch(batch=version.number, index=0, count=1, rank=0, trajectory_ids=names, **columns)


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of a record, without pyarrow."""

    values: np.ndarray

    def __len__(self) -> int:
        return len(self.values)

    def to_numpy(self, **_: object) -> np.ndarray:
        """The values."""
        return self.values

    def to_pylist(self) -> list[Any]:
        """The values as a list."""
        return list(self.values.tolist())
