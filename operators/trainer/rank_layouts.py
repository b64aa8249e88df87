"""The ranks of a trainer through its run: which trained which batches, and where all of them have read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from operators.trainer.checkpoint_files import RankFile, RankLayout, TrainerPosition, file_name
from operators.trainer.ranks import Ranks
from operators.trainer.training_config import TrainingConfig


def layout_of(config: TrainingConfig, since: int = 0) -> RankLayout:
    """The ranks of `config`, which train from batch number `since` on."""
    return RankLayout(since, config.ranks, config.shard_ranks, config.context_ranks)


def with_layout(position: TrainerPosition, config: TrainingConfig) -> TrainerPosition:
    """`position`, from which the ranks of `config` train on."""
    layout = layout_of(config, position.version.number)
    before = [each for each in position.layouts if each.since < layout.since]
    if before and before[-1][1:] == layout[1:]:
        return replace(position, layouts=tuple(before))
    return replace(position, layouts=(*before, layout))


def gather_offsets(ranks: Ranks, partitions: Sequence[int], offsets: Sequence[int]) -> tuple[int, ...]:
    """The offsets of all partitions, of which this rank reads `partitions`, up to `offsets`. A collective."""
    own = torch.tensor([partitions, offsets], dtype=torch.int64).T.reshape(-1, 2)
    read = dict(torch.cat(ranks.gather(own)).tolist())
    return tuple(read[partition] for partition in sorted(read))


def gather_files(ranks: Ranks, file: RankFile) -> list[RankFile]:
    """The files of a checkpoint, in rank order, of which this rank has written `file`. A collective."""
    own = torch.tensor([[file.bytes, *bytes.fromhex(file.blake3)]], dtype=torch.int64)
    found = torch.cat(ranks.gather(own)).tolist()
    return [RankFile(file_name(rank, ranks), size, bytes(digest).hex()) for rank, (size, *digest) in enumerate(found)]


class TrainedPart(NamedTuple):
    """The batches up to number `end` that the ranks of `config` have trained."""

    config: TrainingConfig
    end: int


def trained_parts(config: TrainingConfig, layouts: Sequence[RankLayout], begin: int, end: int) -> Iterator[TrainedPart]:
    """The batches from number `begin` up to `end` of the run of `config`, divided by the ranks that trained them."""
    ends = [*(each.since for each in layouts[1:]), end]
    for layout, until in zip(layouts, ends, strict=True):
        if begin < min(until, end):
            begin = min(until, end)
            _, ranks, shard_ranks, context_ranks = layout
            of_part = replace(
                config, ranks=ranks, batch_shares=config.shares, shard_ranks=shard_ranks, context_ranks=context_ranks
            )
            yield TrainedPart(of_part, begin)
