"""Several shards of the buffer: one dense sequence of batches, with each group in one of them, across restarts."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from record_factories import experience, prompt, trajectory, version
from sharded_buffer_harness import Buffers

from operators.experience.config import Component
from operators.experience.shard_coordination import groups_per_batch
from schemas.identity import parse_trajectory_id
from schemas.records import BatchSelection
from schemas.topics import BATCH_ASSEMBLY, BATCHES, CURRICULUM, SETTLED, batch_partitions


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
def test_groups_per_batch_takes_whole_groups_in_order(sizes: list[int], wanted: int, taken: list[int]) -> None:
    assert groups_per_batch(sizes, wanted) == taken


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0), (0, 4), (1, 3), (5, 1)])
def test_shards_make_a_batch_wherever_its_groups_are(numbers: tuple[int, int]) -> None:
    """Even if all are in one shard: at staleness 0 no more than one batch may be outstanding."""
    buffers = Buffers(max_staleness=0)
    for number in numbers:
        buffers.group(number)
    buffers.run()
    (batch,) = buffers.batches()
    assert sorted(batch) == sorted(f"p{number}.{member}" for number in numbers for member in (0, 1))
    assert Counter(buffers.outcomes().values()) == {"batched": 4}
    assert {r.batch for r in buffers.log.rows(SETTLED)} == {0}


def test_each_shard_writes_its_part_to_its_own_partitions() -> None:
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
    first, second = ([len(written[batch_partitions(rank, 2)[shard], 0, rank]) for rank in (0, 1)] for shard in (0, 1))
    assert (first, second) == ([2, 2], [0, 0])  # both groups of batch 0 are the first shard's
    assert len(buffers.batches()) == 2


def test_shard_proposes_one_batch_at_most_until_selected() -> None:
    buffers = Buffers(global_batch=4)
    for number in range(0, 24, 2):  # all are the first shard's
        buffers.group(number)
    buffers.shards[0].run()
    (proposal,) = buffers.log.rows(BATCH_ASSEMBLY)
    assert len(proposal.groups) == 2
    buffers.run(30)
    assert len(buffers.batches()) == 6


def test_first_shard_selects_each_group_once_after_a_restart() -> None:
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


def test_shard_restores_the_ledger_of_its_own_groups_only() -> None:
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


def test_evictions_do_not_drop_proposed_groups() -> None:
    buffers = Buffers(global_batch=4, evictions=(Component("capacity", {"trajectories": 4}),))
    buffers.group(0)
    buffers.shards[0].run()
    for number in (2, 4, 6):
        buffers.group(number)
    buffers.run()
    assert buffers.batches()[0][:2] == ("p0.0", "p0.1")
    assert Counter(buffers.outcomes().values())["dropped"] == 4


def test_stale_proposed_groups_are_returned_and_dropped() -> None:
    buffers = Buffers(global_batch=4, max_staleness=1, over_age="drop")
    buffers.publish(3)
    buffers.group(1, under=version(2))
    buffers.run()
    buffers.publish(4)
    buffers.group(0, under=version(4))
    buffers.run()
    assert buffers.outcomes() == dict.fromkeys(("p1.0", "p1.1"), "dropped")
    assert [row.batch for row in buffers.log.rows(BATCH_ASSEMBLY) if isinstance(row, BatchSelection)] == [None]
    buffers.group(3, under=version(4))
    buffers.run()
    assert [sorted(batch) for batch in buffers.batches()] == [["p0.0", "p0.1", "p3.0", "p3.1"]]


def test_proposed_partial_group_is_unchanged_after_a_restart() -> None:
    buffers = Buffers(global_batch=4, group_timeout_s=10)
    fold = buffers.shards[1].fold
    fold._clock = lambda: 0.0  # type: ignore[union-attr]
    question = prompt(1, 4)
    buffers.score(*(experience(trajectory(question, member)) for member in (0, 2)))
    buffers.run(1)
    fold._clock = lambda: 10.0  # type: ignore[union-attr]
    buffers.run()
    (proposal,) = buffers.log.rows(BATCH_ASSEMBLY)
    assert (proposal.groups, proposal.sizes) == ((1,), (2,))
    buffers.shards[1].start()
    buffers.run()
    buffers.score(experience(trajectory(question, 3)))
    buffers.group(0)
    buffers.run()
    assert [sorted(batch) for batch in buffers.batches()] == [["p0.0", "p0.1", "p1.0", "p1.2"]]
    assert buffers.outcomes()["p1.3"] == "dropped"


def test_shard_does_not_propose_refused_groups() -> None:
    buffers = Buffers(global_batch=2, sampler=Component("dynamic"))
    for number, rewards in enumerate([(1.0, 1.0), (0.5, 0.6), (0.0, 0.0), (0.1, 0.2)]):
        question = prompt(number, 2)
        buffers.score(*(experience(trajectory(question, m), reward) for m, reward in enumerate(rewards)))
    buffers.run()
    assert sorted(buffers.batches()) == [("p1.0", "p1.1"), ("p3.0", "p3.1")]
    assert Counter(buffers.outcomes().values()) == {"batched": 4, "dropped": 4}


def test_only_the_first_shard_requests_levels_for_all() -> None:
    buffers = Buffers(levels=2, sampler=Component("curriculum", {"least": 4, "harder_above": 0.5}))
    for number in (0, 1):
        buffers.group(number)
    buffers.run()
    buffers.shards[0].start()
    buffers.shards[1].start()
    buffers.run()
    (request,) = buffers.log.rows(CURRICULUM)
    assert (request.level, request.success_rate, request.answered) == (1, 1.0, 4)


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_shards_lose_and_repeat_nothing_across_restarts(seed: int, changes: bool) -> None:
    """With `changes` also while their number changes between restarts."""
    rng = random.Random(seed)
    shards = rng.choice([2, 3])
    buffers = Buffers(
        shards=shards,
        max_shards=3 if changes else 0,
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
            buffers.score_drawn(rng, prompt(number, 3), member, newest - 3, newest)
        elif what < 0.33:
            newest += 1
            buffers.publish(newest)
        elif changes and what < 0.36:
            buffers.reshard(rng.randint(1, 3))
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
    settled_in = {r.trajectory_id: r.batch for r in buffers.log.rows(SETTLED) if r.outcome == "batched"}
    assert settled_in == {name: number for number, batch in enumerate(batches) for name in batch}
    assert {part.batch for part in buffers.log.rows(BATCHES)} == set(range(len(batches))), "a part without its batch"
    registered = [held for each in buffers.shards for held in each.fold._settlements._held.values()]  # type: ignore[union-attr]
    assert sum(map(len, registered)) == 72 - len(outcomes)
    selected = [row.batch for row in buffers.log.rows(BATCH_ASSEMBLY) if isinstance(row, BatchSelection)]
    assert [number for number in selected if number is not None] == list(range(len(batches)))
