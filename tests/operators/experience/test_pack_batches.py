"""PackMicroBatches: a selected batch becomes micro-batches in the partitions of its ranks, in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from record_factories import experience, prompt, trajectory

from operators.experience.members import ExperienceBlock, GroupMember
from operators.experience.pack_batches import SelectedBatch, count_batches, pack_batches
from operators.io.elements import Output
from schemas.block import Block
from schemas.records import Metric
from schemas.topics import BATCHES, METRICS

OTHER = Output(METRICS, "experience", Metric("experience", 1, {}, 0))


def selected(groups: int, samples: int = 2) -> SelectedBatch:
    prompts = [prompt(number, samples) for number in range(groups)]
    rows = [experience(trajectory(asked, member)) for asked in prompts for member in range(samples)]
    block = ExperienceBlock(Block.of(rows), 0, 0)
    members = tuple(GroupMember(block, row) for row in range(len(rows)))
    return SelectedBatch(7, members, np.zeros(len(rows), np.int64))


def rows(outputs: Sequence[Any]) -> list[tuple[int | None, int]]:
    """Partition and number of trajectories of each micro-batch."""
    parts = [output for output in outputs if output.topic is BATCHES]
    assert {output.key for output in parts} == {"7"}
    return [(output.partition, len(output.record.records()[0].trajectory_ids)) for output in parts]


@pytest.mark.parametrize(
    ("ranks", "division", "divisions", "budget", "expected"),
    [
        (1, 0, 1, 10**6, [(0, 8)]),
        (2, 0, 1, 10**6, [(0, 4), (1, 4)]),
        (2, 1, 3, 10**6, [(1, 4), (4, 4)]),
        (1, 0, 1, 10, [(0, 2)] * 4),
    ],
)
def test_batches_have_a_partition_for_each_share_and_division(
    ranks: int, division: int, divisions: int, budget: int, expected: list[tuple[int, int]]
) -> None:
    outputs = [OTHER, replace(selected(4), division=division), OTHER]
    packed = pack_batches(outputs, budget, ranks, divisions)
    assert packed[0] == packed[-1] == OTHER
    assert rows(packed) == expected
    assert count_batches(outputs, packed) == {"batches": 1}
