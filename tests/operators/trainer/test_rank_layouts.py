"""The ranks that have trained each batch of a run, by their checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from operators.trainer.checkpoint_files import RankFile, RankLayout, TrainerPosition
from operators.trainer.rank_layouts import gather_files, gather_offsets, layout_of, trained_parts, with_layout
from operators.trainer.ranks import ALONE, Ranks
from operators.trainer.training_config import TrainingConfig
from schemas.records import PolicyVersion

EIGHT, FOUR = RankLayout(0, 8, 8, 1), RankLayout(20, 4, 0, 2)


def position(number: int, *layouts: RankLayout) -> TrainerPosition:
    return TrainerPosition(PolicyVersion(3, number), (0,), 0, layouts)


@pytest.mark.parametrize(
    ("before", "number", "expected"),
    [
        ((), 0, (RankLayout(0, 4, 0, 2),)),
        ((EIGHT,), 20, (EIGHT, FOUR)),
        ((EIGHT, FOUR), 30, (EIGHT, FOUR)),
        ((EIGHT, RankLayout(20, 2, 0, 1)), 20, (EIGHT, FOUR)),
        ((EIGHT, RankLayout(20, 8, 8, 1)), 20, (EIGHT, FOUR)),
    ],
)
def test_checkpoint_names_the_ranks_that_train_on(
    before: tuple[RankLayout, ...], number: int, expected: tuple[RankLayout, ...]
) -> None:
    config = TrainingConfig(ranks=4, context_ranks=2, batch_shares=8)
    assert with_layout(position(number, *before), config).layouts == expected


def test_ranks_of_before_that_return_add_nothing() -> None:
    config = TrainingConfig(ranks=8, shard_ranks=8)
    assert with_layout(position(20, EIGHT, FOUR), config).layouts == (EIGHT,)


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (0, 30, [(8, 20), (4, 30)]),
        (20, 30, [(4, 30)]),
        (25, 30, [(4, 30)]),
        (0, 20, [(8, 20)]),
        (5, 12, [(8, 12)]),
        (30, 30, []),
    ],
)
def test_batches_are_trained_again_by_their_own_ranks(begin: int, end: int, expected: list[tuple[int, int]]) -> None:
    config = TrainingConfig(ranks=4, context_ranks=2, batch_shares=8)
    parts = list(trained_parts(config, (EIGHT, FOUR), begin, end))
    assert [(part.config.ranks, part.end) for part in parts] == expected
    assert all(part.config.shares == 8 for part in parts)
    assert all(layout_of(part.config)[1:] == (EIGHT if part.config.ranks == 8 else FOUR)[1:] for part in parts)


class Two(Ranks):
    """This rank, and another one that gathers `other`."""

    other: torch.Tensor

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        return [values, self.other]


def test_offsets_of_ranks_with_unequal_shares_are_in_order() -> None:
    ranks = Two(0, 2)
    Two.other = torch.tensor([[1, 70]])
    assert gather_offsets(ranks, (0, 2), (50, 60)) == (50, 70, 60)
    assert gather_offsets(ALONE, (0, 1), (5, 6)) == (5, 6)


def test_files_of_ranks_are_in_rank_order(tmp_path: Path) -> None:
    ranks = Two(0, 2)
    Two.other = torch.tensor([[9, *range(32)]])
    own = RankFile("rank-0-of-2.safetensors", 2**40, "ab" * 32)
    assert gather_files(ranks, own) == [own, RankFile("rank-1-of-2.safetensors", 9, bytes(range(32)).hex())]
