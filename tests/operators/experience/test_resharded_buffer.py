"""Another number of shards of the buffer: every division continues where its shard stopped."""

from __future__ import annotations

import pytest
from sharded_buffer_harness import Buffers

from operators.experience.buffer_layout import BufferLayout
from operators.experience.config import Component, ExperienceConfig
from operators.experience.resharded_state import split_buffer_state
from schemas.metric_labels import LATER_PARTS, SHARD, SHARDS
from schemas.records import BatchSelection
from schemas.topics import BATCH_ASSEMBLY, CURRICULUM, METRICS, SETTLED


@pytest.mark.parametrize(("partitions", "divisions", "shards"), [(1, 1, 1), (4, 2, 1), (5, 3, 2), (8, 8, 3), (7, 5, 5)])
def test_each_partition_and_division_has_one_shard(partitions: int, divisions: int, shards: int) -> None:
    layouts = [BufferLayout(partitions, divisions, shards, shard) for shard in range(shards)]
    assert sorted(p for each in layouts for p in each.own_partitions) == list(range(partitions))
    assert sorted(d for each in layouts for d in each.own_divisions) == list(range(divisions))
    for group in (*range(3 * partitions), *range(-3 * partitions, 0)):
        (owner,) = (each for each in layouts if each.owns(group))
        assert owner.division_of(group) in owner.own_divisions
        assert (group if group >= 0 else ~group) % partitions in owner.own_partitions


def test_new_shard_writes_parts_that_an_old_one_had_not_written() -> None:
    buffers = Buffers(global_batch=4, max_shards=2)
    for number in range(12):
        buffers.group(number)
    buffers.run(1)
    buffers.shards[1].run()
    for _ in range(8):
        buffers.shards[0].run()  # selects batches and writes its parts; the others are missing
    assert sum(isinstance(row, BatchSelection) for row in buffers.log.rows(BATCH_ASSEMBLY)) == 4
    assert not buffers.batches()
    buffers.reshard(1)
    buffers.run(20)
    assert sorted(name for batch in buffers.batches() for name in batch) == sorted(
        f"p{number}.{member}" for number in range(12) for member in (0, 1)
    )
    assert {row.outcome for row in buffers.log.rows(SETTLED)} == {"batched"}
    later = [row.values for row in buffers.log.rows(METRICS) if LATER_PARTS in row.values]
    assert {values[LATER_PARTS] for values in later} == {1.0}
    assert {(values[SHARD], values[SHARDS]) for values in later} == {(0.0, 1.0)}


def test_batches_of_one_shard_have_the_parts_of_all_divisions() -> None:
    buffers = Buffers(shards=1, max_shards=3, global_batch=4)
    for number in range(12):
        buffers.group(number)
    buffers.run(20)
    assert len(buffers.batches()) == 6
    assert all(len(buffers.received(division)) >= 6 for division in range(3))


@pytest.mark.parametrize("counts", [(1,), (3,), (1, 2)])
def test_answers_of_a_level_are_counted_once(counts: tuple[int, ...]) -> None:
    """Three answers of four are needed for the next level, and neither more nor fewer shards count any twice."""
    options = {"least": 12, "harder_above": 0.5}
    buffers = Buffers(levels=2, max_shards=3, sampler=Component("curriculum", options))
    for number in (0, 1, 2, 4):  # eight answers, of all divisions
        buffers.group(number)
    buffers.run(10)
    for shards in counts:
        buffers.reshard(shards)
        buffers.run(10)
    assert not buffers.log.rows(CURRICULUM)
    for number in (5, 6):
        buffers.group(number)
    buffers.run(10)
    (request,) = buffers.log.rows(CURRICULUM)
    assert (request.level, request.answered) == (1, 12)


def test_settled_trajectories_are_not_batched_again() -> None:
    buffers = Buffers(global_batch=4, max_shards=3)
    for number in range(8):
        buffers.group(number)
    buffers.run(10)
    batches = buffers.batches()
    for shards in (3, 1):
        buffers.reshard(shards)
        for number in range(8):
            buffers.group(number)
        buffers.run(10)
    assert buffers.batches() == batches
    assert set(buffers.outcomes().values()) == {"batched"}


def test_state_of_shards_without_a_commit_is_that_of_a_start() -> None:
    state = split_buffer_state([{}, {}], {}, 0, 1, partitions=4, divisions=2)
    assert state == {"settled": {}, "batch": 0, "newest": None, "proposals": [0, [], None]}


def test_newest_of_what_several_shards_have_read_is_kept() -> None:
    states = [{"newest": "0.9", "newest_manifest": [0, 9]}, {"newest": "1.3", "newest_manifest": [1, 8]}]
    state = split_buffer_state(states, {}, 0, 1, partitions=4, divisions=2)
    assert (state["newest"], state["newest_manifest"]) == ("1.3", [1, 9])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shards": 3, "max_shards": 2}, r"max_shards must be 0 or at least shards \(3\), not 2"),
        ({"max_shards": 2, "over_age": "wait"}, "over_age = 'wait' needs max_shards = 0, not 2"),
        ({"shards": 2, "over_age": "wait"}, "over_age = 'wait' needs shards = 1, not 2"),
    ],
)
def test_wrong_numbers_of_shards_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExperienceConfig(**settings)  # type: ignore[arg-type]
