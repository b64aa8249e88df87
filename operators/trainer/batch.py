"""A global batch as the learner uses it: the parts of all micro-batch records joined, validated, still packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from schemas.identity import LETTERS, parse_trajectory_id
from schemas.records import MicroBatch, PolicyVersion


@dataclass(frozen=True, slots=True, eq=False)
class TrainingBatch:
    """n concatenated sequences of t tokens in all.

    token_ids int64[t]; loss_mask bool[t], True where a token is trained; behaviour float32[t], logprobs under the
    rollout's policy in nats; starts, lengths, prompt_lengths, trained (the number of True in loss_mask), group_keys
    (one per group, the same in every part of a global batch), staleness and shares (which share of the batch each is
    in) int64[n]; temperatures float32[n], at which the rollout sampled; truncated bool[n], whether a length limit cut
    the response off; rewards float64[n].
    A sequence is one context, or several if an agent held several conversations: `contexts` int64[n] counts them, and
    `context_lengths` int64[c], c the sum of contexts, has their tokens, `context_trained` int64[c] how many of them are
    trained, and `context_rewards` float64[c] their rewards. No token attends to another context.
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
    shares: np.ndarray
    contexts: np.ndarray
    context_lengths: np.ndarray
    context_trained: np.ndarray
    context_rewards: np.ndarray
    trajectory_ids: tuple[str, ...]
    versions: tuple[PolicyVersion, ...]

    def __len__(self) -> int:
        return len(self.lengths)


def join_parts(parts: Sequence[MicroBatch]) -> TrainingBatch:
    """Join `parts` into the batch, in the order of their index.

    Raises ValueError for no parts, parts of several batches or with the same index, and columns whose lengths disagree;
    and, naming the trajectory: a reward or a trained token's logprob that is not finite, a temperature that is not a
    positive number, a sequence without a prompt, a prompt token or the first token of a context in the loss mask, and a
    repeated trajectory id.
    """
    parts = sorted(parts, key=lambda part: part.index)
    if not parts:
        raise ValueError("a batch needs at least one micro-batch")
    if len({part.batch for part in parts}) > 1 or len({part.index for part in parts}) < len(parts):
        raise ValueError(
            f"the parts (batch, index) are not those of one batch: {[(part.batch, part.index) for part in parts]}"
        )
    ids = tuple(name for part in parts for name in part.trajectory_ids)
    lengths = _column(parts, "lengths", np.int64)
    prompt_lengths = _column(parts, "prompt_lengths", np.int64)
    loss_mask = _column(parts, "loss_mask", np.bool_)
    behaviour = _column(parts, "logprobs", np.float32)
    rewards = _column(parts, "rewards", np.float64)
    token_ids = _column(parts, "token_ids", np.int64)
    staleness = _column(parts, "staleness", np.int64)
    temperatures = _column(parts, "temperatures", np.float32)
    truncated = _column(parts, "truncated", np.bool_)
    epochs, numbers = (_column(parts, name, np.int64) for name in ("version_epochs", "version_numbers"))
    for name, column in (
        ("lengths", lengths),
        ("prompt_lengths", prompt_lengths),
        ("rewards", rewards),
        ("temperatures", temperatures),
        ("truncated", truncated),
        ("staleness", staleness),
        ("version_epochs", epochs),
        ("version_numbers", numbers),
    ):
        _same_length(parts[0].batch, "sequences", len(ids), name, column)
    _reject(
        ids,
        (lengths < 0) | (lengths > len(token_ids)),
        "has a length below 0, or above the batch's tokens",
    )
    if (tokens := int(lengths.sum())) != len(token_ids):
        raise ValueError(f"batch {parts[0].batch} has {tokens} tokens by its lengths, but {len(token_ids)} token_ids")
    sequences = np.repeat(np.arange(len(lengths)), lengths)
    for name, column in (("token_ids", token_ids), ("loss_mask", loss_mask), ("logprobs", behaviour)):
        _same_length(parts[0].batch, "tokens by its lengths", len(sequences), name, column)
    starts = np.cumsum(lengths) - lengths
    _reject(ids, (prompt_lengths < 1) | (prompt_lengths > lengths), "has no prompt, or one longer than the sequence")
    _reject(ids, ~np.isfinite(rewards), "has a reward that is not finite")
    _reject(ids, ~((temperatures > 0) & (temperatures < np.inf)), "was sampled at a temperature that is not positive")
    broken = loss_mask & ~np.isfinite(behaviour)
    _reject(ids, np.bincount(sequences, broken, len(ids)) > 0, "has a behaviour logprob that is not finite")
    in_prompt = np.arange(len(sequences)) - starts[sequences] < prompt_lengths[sequences]
    _reject(ids, np.bincount(sequences, loss_mask & in_prompt, len(ids)) > 0, "has a prompt token in its loss mask")
    breaks = _breaks(parts)
    _reject(ids, np.isin(starts, breaks), "begins with a break: its prompt must precede it")
    edges = np.union1d(starts, breaks)
    contexts = np.bincount(np.searchsorted(starts, edges, side="right") - 1, minlength=len(ids)).astype(np.int64)
    _reject(ids, np.bincount(sequences[breaks], loss_mask[breaks], len(ids)) > 0, "trains the first token of a context")
    repeated = np.array([name in ids[:index] for index, name in enumerate(ids)]) if len(set(ids)) < len(ids) else ()
    _reject(ids, repeated, "occurs more than once in the batch")
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
        shares=np.repeat([part.rank for part in parts], [len(part.trajectory_ids) for part in parts]),
        contexts=contexts,
        context_lengths=np.diff(edges, append=len(token_ids)),
        context_trained=np.diff(np.append(0, np.cumsum(loss_mask))[np.append(edges, len(token_ids))]),
        context_rewards=_context_rewards(parts, ids, contexts),
        trajectory_ids=ids,
        versions=tuple(map(PolicyVersion, epochs.tolist(), numbers.tolist())),
    )


def concatenate(batches: Sequence[TrainingBatch]) -> TrainingBatch:
    """The sequences of `batches`, one after the other."""
    if len(batches) == 1:
        return batches[0]
    columns = {
        each.name: np.concatenate([getattr(batch, each.name) for batch in batches])
        for each in fields(TrainingBatch)
        if each.name not in ("starts", "trajectory_ids", "versions")
    }
    return TrainingBatch(
        **columns,
        starts=np.cumsum(columns["lengths"]) - columns["lengths"],
        trajectory_ids=tuple(name for batch in batches for name in batch.trajectory_ids),
        versions=tuple(version for batch in batches for version in batch.versions),
    )


def reject_unknown_tokens(batch: TrainingBatch, vocabulary: int) -> None:
    """Raise ValueError naming the first trajectory with a token id outside [0, `vocabulary`)."""
    unknown = (batch.token_ids < 0) | (batch.token_ids >= vocabulary)
    if unknown.any():
        of = np.add.reduceat(unknown, batch.starts) > 0
        _reject(batch.trajectory_ids, of, f"has a token id outside the model's vocabulary of {vocabulary}")


def _same_length(batch: int, what: str, count: int, name: str, column: np.ndarray) -> None:
    if len(column) != count:
        raise ValueError(f"batch {batch} has {count} {what}, but {len(column)} {name}")


def _column(parts: Sequence[MicroBatch], name: str, dtype: type) -> np.ndarray:
    return np.concatenate([getattr(part, name).to_numpy(zero_copy_only=False).astype(dtype) for part in parts])


def _breaks(parts: Sequence[MicroBatch]) -> np.ndarray:
    """Where contexts restart among the tokens of all parts, int64, rising. Raises ValueError."""
    found, start = [np.empty(0, np.int64)], 0
    for part in parts:
        breaks, tokens = part.breaks.to_numpy().astype(np.int64), len(part.token_ids)
        if len(breaks) and (breaks[0] < 0 or breaks[-1] >= tokens or (np.diff(breaks) <= 0).any()):
            raise ValueError(f"batch {part.batch} has breaks that are not rising positions among its {tokens} tokens")
        found.append(breaks + start)
        start += tokens
    return np.concatenate(found)


def _context_rewards(parts: Sequence[MicroBatch], ids: Sequence[str], contexts: np.ndarray) -> np.ndarray:
    """The reward of each context of all parts, float64. Raises ValueError."""
    found, row = [np.empty(0)], 0
    for part in parts:
        counts = contexts[row : row + len(part.trajectory_ids)]
        rewards = part.context_rewards.to_numpy().astype(np.float64)
        if not len(rewards):
            rewards = np.repeat(part.rewards.to_numpy().astype(np.float64), counts)
        _same_length(part.batch, "contexts", int(counts.sum()), "context_rewards", rewards)
        found.append(rewards)
        row += len(counts)
    joined = np.concatenate(found)
    of = np.repeat(np.arange(len(ids)), contexts)
    _reject(ids, np.bincount(of, ~np.isfinite(joined), len(ids)) > 0, "has a conversation's reward that is not finite")
    return joined


def _reject(ids: Sequence[str], wrong: np.ndarray | tuple[()], reason: str) -> None:
    if len(found := np.flatnonzero(wrong)):
        others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise ValueError(f"trajectory {ids[found[0]]}{others} {reason}")
