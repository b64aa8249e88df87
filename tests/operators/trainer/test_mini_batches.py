"""Mini-batches of batches that the buffer packs: each is divided over all ranks, and is that of a single rank."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from record_factories import experience, prompt, trajectory
from sampled_batches import read_members

from operators.experience.pack_batches import pack
from operators.trainer.batch import join_parts
from operators.trainer.global_batch_metadata import gather_metadata
from operators.trainer.packing import mini_batches
from operators.trainer.ranks import ALONE
from schemas.block import Block
from schemas.records import MicroBatch


def recorded(groups: int, ranks: int) -> list[MicroBatch]:
    """The parts of a batch for all of `ranks`, in their order, as a replay by a single rank reads them."""
    lengths = np.random.default_rng(0).integers(1, 40, groups)
    rows = [experience(trajectory(prompt(n, 2), m, tokens=int(lengths[n]))) for n in range(groups) for m in range(2)]
    members = read_members(Block.of(rows), 0, 0)
    packed = pack(0, members, np.zeros(len(rows), np.int64), budget=60, shares=ranks)
    parts = [part for block in itertools.chain(*packed) for part in block.records()]
    return [replace(part, index=index, count=len(parts)) for index, part in enumerate(parts)]


def steps(groups: int, ranks: int, count: int) -> list[dict[str, int]]:
    """The rank of each group of each mini-batch, by the group's name."""
    batch = join_parts(recorded(groups, ranks))
    metadata = gather_metadata(batch, ALONE)
    return [
        {batch.trajectory_ids[row].partition(".")[0]: int(batch.shares[row]) for row in rows}
        for rows in mini_batches(metadata.groups, count)
    ]


@pytest.mark.parametrize(
    ("groups", "ranks", "count"),
    [(32, 2, 4), (32, 8, 4), (16, 8, 16), (24, 3, 8), (30, 4, 4), (7, 2, 2), (5, 8, 2)],
)
def test_each_mini_batch_is_divided_over_all_ranks(groups: int, ranks: int, count: int) -> None:
    found = steps(groups, ranks, count)
    assert len(found) == min(groups, count)
    assert sum(map(len, found)) == groups
    for step in found:
        on_ranks = np.bincount(list(step.values()), minlength=ranks)
        assert on_ranks.max() <= len(step) // ranks + 1
        if len(step) % ranks == 0 and groups % count == 0:
            assert set(on_ranks.tolist()) == {len(step) // ranks}


@pytest.mark.parametrize(("groups", "shares", "count"), [(32, 4, 4), (30, 8, 4), (7, 3, 2)])
def test_any_number_of_ranks_has_the_same_mini_batches(groups: int, shares: int, count: int) -> None:
    parts = recorded(groups, shares)
    found = []
    for ranks in range(1, shares + 1):
        in_rank_order = [part for rank in range(ranks) for part in parts if part.rank % ranks == rank]
        batch = join_parts([replace(part, index=index) for index, part in enumerate(in_rank_order)])
        rows = mini_batches(gather_metadata(batch, ALONE).groups, count)
        found.append([{batch.trajectory_ids[row] for row in step} for step in rows])
    assert all(steps == found[0] for steps in found)


@pytest.mark.parametrize(("groups", "ranks", "count"), [(32, 2, 4), (32, 8, 4), (24, 3, 8)])
def test_mini_batches_of_ranks_are_those_of_one(groups: int, ranks: int, count: int) -> None:
    found, alone = (steps(groups, number, count) for number in (ranks, 1))
    assert [set(step) for step in found] == [set(step) for step in alone]
