"""Keys of elements that Flink processes in a chosen subtask."""

from __future__ import annotations

import pytest

from infra.runners.flink_slots import default_key_groups, key_in_subtask, name_of_key, subtask_of

PARALLELISM = (1, 2, 3, 4, 7, 100)
FLINK = {
    "laminar.r.score.0": (0, 1, 1, 2, 4, 30),
    "laminar.r.score.1": (0, 1, 2, 2, 4, 35),
    "laminar.r.score.1 3": (0, 1, 2, 3, 6, 94),
    "laminar.run.experience.12 7": (0, 0, 0, 1, 2, 64),
    "x" * 200: (0, 0, 0, 0, 0, 5),
    "\u00e9": (0, 0, 0, 0, 1, 59),
}
"""By key: `KeyGroupRangeAssignment.assignKeyToParallelOperator(FlinkKey.of(key, StringUtf8Coder.of()), groups, n)` of
Flink 1.19.0 and Beam 2.70.0 for each parallelism n."""


@pytest.mark.parametrize("key", FLINK)
def test_subtask_of_a_key_is_that_of_flink(key: str) -> None:
    assert tuple(subtask_of(key, each, default_key_groups(each)) for each in PARALLELISM) == FLINK[key]


@pytest.mark.parametrize("parallelism", PARALLELISM)
@pytest.mark.parametrize("key_groups", [None, 720])
def test_key_in_subtask_reaches_every_subtask(parallelism: int, key_groups: int | None) -> None:
    keys = [key_in_subtask("laminar.r.score.0", each, parallelism, key_groups) for each in range(parallelism)]
    groups = key_groups or default_key_groups(parallelism)
    assert [subtask_of(key, parallelism, groups) for key in keys] == list(range(parallelism))
    assert {name_of_key(key) for key in keys} == {"laminar.r.score.0"}


def test_default_key_groups_is_flinks_maximum_parallelism() -> None:
    assert [default_key_groups(each) for each in (1, 85, 86, 200, 40_000)] == [128, 128, 256, 512, 32768]
