"""Several shards of the buffer: one dense line of batches, each group in one of them, whoever dies when."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from record_factories import experience, failed, prompt, trajectory, version
from sharded_buffer_harness import Buffers

from operators.experience.parts import Component
from operators.experience.sharing import quotas
from schemas.identity import parse_trajectory_id
from schemas.records import BatchSelection
from schemas.topics import BATCH_ASSEMBLY, BATCHES, CURRICULUM, SETTLED, parts_of_rank


@pytest.mark.parametrize(
    ("sizes", "wanted", "taken"),
    [
        ([], 4, []),
        ([3], 4, []),
        ([4], 4, [1]),
        ([3, 1], 4, [2]),
        ([3, 3, 3], 4, [2]),
        ([2, 2, 2, 2], 4, [2, 2]),
        ([9, 1, 3, 1], 4, [1, 2]),
        ([1, 1, 1], 1, [1, 1, 1]),
    ],
)
def test_a_batch_takes_whole_groups_in_the_order_in_which_they_were_offered(
    sizes: list[int], wanted: int, taken: list[int]
) -> None:
    assert quotas(sizes, wanted) == taken


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0), (0, 4), (1, 3), (5, 1)])
def test_a_batch_is_made_wherever_its_groups_are(numbers: tuple[int, int]) -> None:
    """Even all in one shard: what may be outstanding at staleness 0 is no more than one batch."""
    buffers = Buffers(max_staleness=0)
    for number in numbers:
        buffers.group(number)
    buffers.run()
    (batch,) = buffers.batches()
    assert sorted(batch) == sorted(f"p{number}.{member}" for number in numbers for member in (0, 1))
    assert Counter(buffers.outcomes().values()) == {"batched": 4}
    assert {r.batch for r in buffers.log.rows(SETTLED)} == {0}


def test_every_shard_has_a_part_of_every_batch_in_partitions_of_its_own() -> None:
    buffers = Buffers(shards=2, ranks=2)
    for number in (0, 4, 1, 3):
        buffers.group(number)
    buffers.run()
    written = {
        (partition, part.batch, part.rank): part.trajectory_ids
        for partition in range(4)
        for part in (r.record for r in buffers.received(partition))
    }
    assert len(written) == 8
    first, second = ([len(written[parts_of_rank(rank, 2)[shard], 0, rank]) for rank in (0, 1)] for shard in (0, 1))
    assert (first, second) == ([2, 2], [0, 0])  # both groups of batch 0 are the first shard's
    assert len(buffers.batches()) == 2


def test_each_shard_sets_aside_a_batch_at_most_and_goes_on_when_it_is_called() -> None:
    buffers = Buffers(global_batch=4)
    for number in range(0, 24, 2):  # all are the first shard's
        buffers.group(number)
    buffers.shards[0].run()
    (offered,) = buffers.log.rows(BATCH_ASSEMBLY)
    assert len(offered.groups) == 2
    buffers.run(30)
    assert len(buffers.batches()) == 6


def test_the_first_shard_calls_each_offer_once_after_a_restart() -> None:
    buffers = Buffers(global_batch=4)
    buffers.group(1)
    buffers.shards[1].run()
    buffers.group(0)
    buffers.group(4)
    buffers.run()
    assert [sorted(batch) for batch in buffers.batches()] == [["p0.0", "p0.1", "p1.0", "p1.1"]]
    buffers.shards[0].start()
    buffers.group(3)
    buffers.run()
    assert sorted(buffers.batches()[1]) == ["p3.0", "p3.1", "p4.0", "p4.1"]
    assert len(buffers.batches()) == 2


def test_a_shard_remembers_the_endings_of_its_own_groups_alone() -> None:
    buffers = Buffers(global_batch=2)
    for number in range(8):
        buffers.group(number)
    buffers.run(20)
    for each in buffers.shards:
        each.start()
    buffers.run()
    for index, each in enumerate(buffers.shards):
        settled = each.fold.checkpoint({}).state["settled"]  # type: ignore[union-attr]
        assert settled == {f"p{index}": 2, f"p{index + 2}": 2}


def test_what_is_set_aside_is_not_evicted_and_the_rest_is() -> None:
    buffers = Buffers(global_batch=4, evictions=(Component("capacity", {"trajectories": 4}),))
    buffers.group(0)
    buffers.shards[0].run()
    for number in (2, 4, 6):
        buffers.group(number)
    buffers.run()
    assert buffers.batches()[0][:2] == ("p0.0", "p0.1")
    assert Counter(buffers.outcomes().values())["dropped"] == 4


def test_what_has_grown_too_old_meanwhile_is_taken_back_and_dropped() -> None:
    buffers = Buffers(global_batch=4, max_staleness=1, over_age="drop")
    buffers.publish(3)
    buffers.group(1, under=version(2))
    buffers.run()
    buffers.publish(4)
    buffers.group(0, under=version(4))
    buffers.run()
    assert buffers.outcomes() == dict.fromkeys(("p1.0", "p1.1"), "dropped")
    assert [call.batch for call in buffers.log.rows(BATCH_ASSEMBLY) if isinstance(call, BatchSelection)] == [None]
    buffers.group(3, under=version(4))
    buffers.run()
    assert [sorted(batch) for batch in buffers.batches()] == [["p0.0", "p0.1", "p3.0", "p3.1"]]


def test_a_group_that_was_offered_without_all_its_members_stays_as_it_was_after_a_restart() -> None:
    buffers = Buffers(global_batch=4, group_timeout_s=10)
    fold = buffers.shards[1].fold
    fold._clock = lambda: 0.0  # type: ignore[union-attr]
    asked = prompt(1, 4)
    buffers.score(*(experience(trajectory(asked, member)) for member in (0, 2)))
    buffers.run(1)
    fold._clock = lambda: 10.0  # type: ignore[union-attr]
    buffers.run()
    (offered,) = buffers.log.rows(BATCH_ASSEMBLY)
    assert (offered.groups, offered.sizes) == ((1,), (2,))
    buffers.shards[1].start()
    buffers.run()
    buffers.score(experience(trajectory(asked, 3)))
    buffers.group(0)
    buffers.run()
    assert [sorted(batch) for batch in buffers.batches()] == [["p0.0", "p0.1", "p1.0", "p1.2"]]
    assert buffers.outcomes()["p1.3"] == "dropped"


def test_groups_that_the_sampler_refuses_are_never_offered() -> None:
    buffers = Buffers(global_batch=2, sampler=Component("dynamic"))
    for number, rewards in enumerate([(1.0, 1.0), (0.5, 0.6), (0.0, 0.0), (0.1, 0.2)]):
        asked = prompt(number, 2)
        buffers.score(*(experience(trajectory(asked, m), reward) for m, reward in enumerate(rewards)))
    buffers.run()
    assert sorted(buffers.batches()) == [("p1.0", "p1.1"), ("p3.0", "p3.1")]
    assert Counter(buffers.outcomes().values()) == {"batched": 4, "dropped": 4}


def test_success_is_told_among_shards_and_the_first_alone_asks_for_a_level() -> None:
    buffers = Buffers(levels=2, sampler=Component("curriculum", {"least": 4, "harder_above": 0.5}))
    for number in (0, 1):
        buffers.group(number)
    buffers.run()
    buffers.shards[0].start()
    buffers.shards[1].start()
    buffers.run()
    (asked,) = buffers.log.rows(CURRICULUM)
    assert (asked.level, asked.success, asked.answered) == (1, 1.0, 4)


@pytest.mark.parametrize("seed", range(25))
def test_whoever_dies_when_nothing_is_lost_and_nothing_settled_twice(seed: int) -> None:
    rng = random.Random(seed)
    shards = rng.choice([2, 3])
    buffers = Buffers(
        shards=shards,
        partitions=rng.choice([3, 4]),
        ranks=rng.choice([1, 2]),
        global_batch=rng.choice([1, 5, 8]),
        max_staleness=1,
        over_age=rng.choice(["correct", "drop"]),
    )
    waiting = [(number, member) for number in range(24) for member in range(3)]
    rng.shuffle(waiting)
    newest = 0
    while waiting or rng.random() < 0.9:
        what, one = rng.random(), rng.choice(buffers.shards)
        if what < 0.3 and waiting:
            number, member = waiting.pop()
            asked, under = prompt(number, 3), version(rng.randint(max(0, newest - 3), newest))
            broken = rng.random() < 0.1
            buffers.score(experience(failed(asked, member) if broken else trajectory(asked, member, under=under)))
        elif what < 0.33:
            newest += 1
            buffers.publish(newest)
        elif what < 0.42:
            one.start()
        elif what < 0.75:
            one.turn(rng.choice([1, 3, 99]), rng.sample(one.places, rng.randint(1, len(one.places))))
        else:
            one.commit()
    buffers.run(60)
    batches, outcomes = buffers.batches(), buffers.outcomes()
    batched = [name for batch in batches for name in batch]
    assert sorted(batched) == sorted(name for name, outcome in outcomes.items() if outcome == "batched")
    least = buffers.shards[0].fold._config.global_batch  # type: ignore[union-attr]
    assert all(len(batch) >= least for batch in batches)
    groups = [{parse_trajectory_id(name).number for name in batch} for batch in batches]
    assert sum(map(len, groups)) == len(set().union(*groups))
    assert 72 - len(outcomes) < max(least, 1)
    named = {r.trajectory_id: r.batch for r in buffers.log.rows(SETTLED) if r.outcome == "batched"}
    assert named == {name: number for number, batch in enumerate(batches) for name in batch}
    assert {part.batch for part in buffers.log.rows(BATCHES)} == set(range(len(batches))), "a part without its batch"
    assert sum(each.fold._endings.held() for each in buffers.shards) == 72 - len(outcomes)  # type: ignore[union-attr]
    calls = [call.batch for call in buffers.log.rows(BATCH_ASSEMBLY) if isinstance(call, BatchSelection)]
    assert [number for number in calls if number is not None] == list(range(len(batches)))
