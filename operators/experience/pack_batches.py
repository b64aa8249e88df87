"""PackMicroBatches: the micro-batches of a selected batch, one partition for each rank and shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from operators.experience.members import GroupMember
from operators.experience.packing import pack
from operators.io.elements import Output
from operators.io.map_outputs import MapOutputs
from schemas.topics import BATCHES, batch_partitions


@dataclass(frozen=True, slots=True)
class SelectedBatch:
    """The members of global batch `number` that a shard of the buffer has selected; `staleness` is aligned with them.

    The fold has settled them, so the batch must be written in the same transaction.
    """

    number: int
    members: tuple[GroupMember, ...]
    staleness: np.ndarray


class PackMicroBatches(MapOutputs):
    """Packs selected batches into micro-batches of at most `budget` tokens, equally many for each of `ranks` ranks.

    `shard` of `shards` of the buffer has one partition of each rank.
    """

    writes = (BATCHES,)

    def __init__(self, budget: int, ranks: int, shard: int = 0, shards: int = 1) -> None:
        super().__init__(partial(pack_batches, budget=budget, ranks=ranks, shard=shard, shards=shards), count_batches)


def pack_batches(outputs: Sequence[Any], budget: int, ranks: int, shard: int = 0, shards: int = 1) -> list[Any]:
    """The micro-batches of the selected batches in `outputs`; all other outputs stay, in their place."""

    def packed(output: Any) -> Iterator[Any]:
        if not isinstance(output, SelectedBatch):
            yield output
            return
        by_rank = pack(output.number, output.members, output.staleness, budget, ranks)
        for rank, parts in enumerate(by_rank):
            partition = batch_partitions(rank, shards)[shard]
            yield from (Output(BATCHES, str(output.number), part, partition) for part in parts)

    return [each for output in outputs for each in packed(output)]


def count_batches(outputs: Sequence[Any], _: Sequence[Any]) -> dict[str, int]:
    """The counter of the step: batches. The fold counts their trajectories, the sink their micro-batches."""
    batches = sum(isinstance(output, SelectedBatch) for output in outputs)
    return {"batches": batches} if batches else {}
