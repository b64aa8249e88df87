"""Each rank gathers the metadata of the global batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
from torch import Tensor
from trainer_batches import make_batch

from operators.trainer.batch import join_parts
from operators.trainer.global_batch_metadata import gather_metadata
from operators.trainer.learner import Learner
from operators.trainer.ranks import ALONE


class Second:
    """The second of two ranks with the same part of a batch."""

    rank = 1

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor, tensor]


def test_groups_of_shares_take_turns_in_mini_batches() -> None:
    """Groups have successive numbers, whatever their keys, by their places in their shares."""
    keys, shares = [70, 30, 90, 50, 10, 20, 60, 40], [0, 0, 0, 1, 1, 2, 2, 2]
    batch = replace(join_parts(make_batch()), group_keys=np.repeat(keys, 2), shares=np.repeat(shares, 2))
    assert gather_metadata(batch, ALONE).groups.reshape(-1, 2)[:, 0].tolist() == [0, 3, 6, 2, 5, 1, 4, 7]


def test_second_rank_has_the_rows_and_tokens_after_the_first() -> None:
    batch = join_parts(make_batch())
    ranks: Any = Second()
    found, trained = gather_metadata(batch, ranks), int(batch.trained.sum())
    assert (found.rows, found.tokens) == (slice(len(batch), 2 * len(batch)), slice(trained, 2 * trained))
    assert found.lengths.tolist() == 2 * batch.lengths.tolist()


def test_rows_of_a_rank_are_indices_into_its_own_batch() -> None:
    own = Learner._local_rows(Mock(), np.array([0, 1, 2, 4, 5, 7]), Mock(rows=slice(2, 5)))
    assert own.tolist() == [0, 2]
