"""From experiences to micro-batches: sequences laid end to end, in parts of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from operators.experience.groups import Held
from schemas.columns import flags, floats, integers, token_ids
from schemas.records import MicroBatch


def split_by_tokens(lengths: Sequence[int], budget: int) -> Iterator[range]:
    """Consecutive ranges of sequences with at most `budget` tokens each; a longer sequence is alone in its range."""
    start = total = 0
    for index, length in enumerate(lengths):
        if index > start and total + length > budget:
            yield range(start, index)
            start, total = index, 0
        total += length
    if start < len(lengths):
        yield range(start, len(lengths))


def pack(batch: int, held: Sequence[Held], staleness: Sequence[int], budget: int) -> list[MicroBatch]:
    """Global batch number `batch` as micro-batches of at most `budget` tokens.

    `staleness` is aligned with `held`. Every part says how many there are, so a reader knows when the batch is whole.
    """
    lengths = [
        len(h.experience.trajectory.prompt.token_ids) + len(h.experience.trajectory.response.token_ids) for h in held
    ]
    ranges = list(split_by_tokens(lengths, budget))
    return [
        _micro_batch(batch, index, len(ranges), [held[i] for i in part], [staleness[i] for i in part])
        for index, part in enumerate(ranges)
    ]


def _micro_batch(batch: int, index: int, count: int, held: Sequence[Held], staleness: Sequence[int]) -> MicroBatch:
    trajectories = [h.experience.trajectory for h in held]
    prompts = [len(t.prompt.token_ids) for t in trajectories]
    versions = [t.version_spans[0].version for t in trajectories]
    ids: list[pa.Array] = []
    logprobs: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    for trajectory, prompt in zip(trajectories, prompts, strict=True):
        response = trajectory.response
        ids += [trajectory.prompt.token_ids, response.token_ids]
        logprobs += [np.zeros(prompt, np.float32), response.logprobs.to_numpy(zero_copy_only=False)]
        masks += [np.zeros(prompt, bool), response.loss_mask.to_numpy(zero_copy_only=False)]
    return MicroBatch(
        batch=batch,
        index=index,
        count=count,
        rank=0,
        token_ids=pa.concat_arrays(ids) if ids else token_ids([]),
        logprobs=floats(np.concatenate(logprobs)),
        loss_mask=flags(np.concatenate(masks)),
        lengths=integers([p + len(t.response.token_ids) for p, t in zip(prompts, trajectories, strict=True)]),
        prompt_lengths=integers(prompts),
        rewards=floats([h.experience.reward for h in held]),
        trajectory_ids=tuple(t.trajectory_id for t in trajectories),
        version_epochs=integers([version.epoch for version in versions]),
        version_numbers=integers([version.number for version in versions]),
        staleness=integers(staleness),
        lineage_partitions=integers([h.partition for h in held]),
        lineage_offsets=integers([h.offset for h in held]),
    )
