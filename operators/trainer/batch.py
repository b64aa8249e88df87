"""A global batch as the update sees it: the parts of all micro-batch records joined, checked, and still packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from schemas.identity import LETTERS, parse_trajectory_id
from schemas.records import MicroBatch, PolicyVersion


@dataclass(frozen=True, slots=True, eq=False)
class TrainingBatch:
    """n sequences of t tokens in all, one after the other.

    token_ids int64[t]; loss_mask bool[t], True where a token is trained; behaviour float32[t], logprobs under the
    rollout's policy in nats; starts, lengths, prompt_lengths, trained (the number of True in loss_mask), group_keys
    (one a group, the same in every part of a global batch) and staleness int64[n]; temperatures float32[n], at which
    the rollout drew; truncated bool[n], whether a length limit cut the response off; rewards float64[n].
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    behaviour: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    prompt_lengths: np.ndarray
    trained: np.ndarray
    group_keys: np.ndarray
    staleness: np.ndarray
    temperatures: np.ndarray
    truncated: np.ndarray
    rewards: np.ndarray
    trajectory_ids: tuple[str, ...]
    versions: tuple[PolicyVersion, ...]

    def __len__(self) -> int:
        return len(self.lengths)


def join_parts(rows: Sequence[MicroBatch]) -> TrainingBatch:
    """The batch whose parts are `rows`, in the order of their index.

    Raises ValueError for no rows, rows of more than one batch or with the same index, columns of lengths that do not
    agree, and, naming the trajectory: a reward or a logprob of a trained token that is not finite, a temperature that
    is not a positive number, a sequence without a prompt, and one that repeats another's id.
    """
    rows = sorted(rows, key=lambda row: row.index)
    if not rows:
        raise ValueError("a batch needs at least one micro-batch")
    if len({row.batch for row in rows}) > 1 or len({row.index for row in rows}) < len(rows):
        raise ValueError(f"not the parts of one batch: {[(row.batch, row.index) for row in rows]}")
    ids = tuple(name for row in rows for name in row.trajectory_ids)
    lengths = _column(rows, "lengths", np.int64)
    prompt_lengths = _column(rows, "prompt_lengths", np.int64)
    loss_mask = _column(rows, "loss_mask", np.bool_)
    behaviour = _column(rows, "logprobs", np.float32)
    rewards = _column(rows, "rewards", np.float64)
    token_ids = _column(rows, "token_ids", np.int64)
    staleness = _column(rows, "staleness", np.int64)
    temperatures = _column(rows, "temperatures", np.float32)
    truncated = _column(rows, "truncated", np.bool_)
    for name, column in (
        ("lengths", lengths),
        ("prompt_lengths", prompt_lengths),
        ("rewards", rewards),
        ("temperatures", temperatures),
        ("truncated", truncated),
        ("staleness", staleness),
    ):
        _same_length(rows[0].batch, "sequences", len(ids), name, column)
    _refuse(ids, (lengths < 0) | (lengths > len(token_ids)), "has a length below 0, or above all tokens of the batch")
    if (tokens := int(lengths.sum())) != len(token_ids):
        raise ValueError(f"batch {rows[0].batch} has {tokens} tokens by its lengths, but {len(token_ids)} token_ids")
    sequences = np.repeat(np.arange(len(lengths)), lengths)
    for name, column in (("token_ids", token_ids), ("loss_mask", loss_mask), ("logprobs", behaviour)):
        _same_length(rows[0].batch, "tokens by its lengths", len(sequences), name, column)
    starts = np.cumsum(lengths) - lengths
    _refuse(ids, (prompt_lengths < 1) | (prompt_lengths > lengths), "has no prompt, or one longer than itself")
    _refuse(ids, ~np.isfinite(rewards), "has a reward that is not finite")
    _refuse(ids, ~((temperatures > 0) & (temperatures < np.inf)), "was drawn at a temperature that is not positive")
    broken = loss_mask & ~np.isfinite(behaviour)
    _refuse(ids, np.bincount(sequences, broken, len(ids)) > 0, "has a behaviour logprob that is not finite")
    in_prompt = np.arange(len(sequences)) - starts[sequences] < prompt_lengths[sequences]
    _refuse(ids, np.bincount(sequences, loss_mask & in_prompt, len(ids)) > 0, "has a prompt token in its loss mask")
    repeated = np.array([name in ids[:index] for index, name in enumerate(ids)]) if len(set(ids)) < len(ids) else ()
    _refuse(ids, repeated, "is in the batch twice")
    keys = [parse_trajectory_id(name) for name in ids]
    purposes = list(LETTERS)
    return TrainingBatch(
        token_ids=token_ids,
        loss_mask=loss_mask,
        behaviour=behaviour,
        starts=starts,
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        trained=np.bincount(sequences, loss_mask, len(ids)).astype(np.int64),
        group_keys=np.array([len(purposes) * key.number + purposes.index(key.purpose) for key in keys], np.int64),
        staleness=staleness,
        temperatures=temperatures,
        truncated=truncated,
        rewards=rewards,
        trajectory_ids=ids,
        versions=tuple(
            PolicyVersion(int(epoch), int(number))
            for row in rows
            for epoch, number in zip(row.version_epochs.to_pylist(), row.version_numbers.to_pylist(), strict=True)
        ),
    )


def reject_unknown_tokens(batch: TrainingBatch, vocabulary: int) -> None:
    """Raise ValueError naming the first trajectory with a token id that is not in [0, `vocabulary`)."""
    unknown = (batch.token_ids < 0) | (batch.token_ids >= vocabulary)
    if unknown.any():
        of = np.add.reduceat(unknown, batch.starts) > 0
        _refuse(batch.trajectory_ids, of, f"has a token that the model, of {vocabulary}, does not know")


def _same_length(batch: int, what: str, count: int, name: str, column: np.ndarray) -> None:
    if len(column) != count:
        raise ValueError(f"batch {batch} has {count} {what}, but {len(column)} {name}")


def _column(rows: Sequence[MicroBatch], name: str, dtype: type) -> np.ndarray:
    return np.concatenate([getattr(row, name).to_numpy(zero_copy_only=False).astype(dtype) for row in rows])


def _refuse(ids: Sequence[str], wrong: np.ndarray | tuple[()], why: str) -> None:
    if len(found := np.flatnonzero(wrong)):
        others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise ValueError(f"trajectory {ids[found[0]]}{others} {why}")
