"""The buffer: whole groups, dense batch numbers, each trajectory settled once, across restarts at any point."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from buffer_harness import Buffer
from record_factories import SAMPLING, experience, failed, prompt, settled, trajectory, version

from operators.experience.config import MAX_MICRO_BATCH_TOKENS, Component, ExperienceConfig
from operators.experience.make_batches import MAX_BATCHES_PER_FOLD
from operators.experience.pack_batches import split_by_tokens
from operators.io.elements import PartitionKey
from schemas.columns import flags, floats, token_ids
from schemas.identity import parse_trajectory_id
from schemas.records import MicroBatch, Response
from schemas.topics import BATCHES, EXPERIENCES, METRICS, SETTLED


def test_batch_takes_whole_groups_until_it_is_full() -> None:
    buffer = Buffer(global_batch=5)
    buffer.group(0, 2)
    buffer.group(2, 2)
    assert buffer.shard.run() == []
    buffer.group(4, 3)
    buffer.group(6, 2)
    buffer.shard.run()
    assert buffer.batches() == [("p0.0", "p0.1", "p2.0", "p2.1", "p4.0", "p4.1", "p4.2")]
    assert Counter(buffer.outcomes().values()) == {"batched": 7}


def test_groups_leave_in_the_order_of_completion() -> None:
    buffer = Buffer(global_batch=2)
    first, second = prompt(0), prompt(2)
    buffer.score(experience(trajectory(first, 0)), *(experience(trajectory(second, m)) for m in (0, 1)))
    buffer.score(experience(trajectory(first, 1)))
    buffer.shard.run()
    assert buffer.batches() == [("p2.0", "p2.1"), ("p0.0", "p0.1")]


def test_fold_makes_a_bounded_number_of_batches() -> None:
    buffer = Buffer(global_batch=2)
    for number in range(2 * MAX_BATCHES_PER_FOLD + 1):
        buffer.group(number)
    for made in (1, 2):
        buffer.shard.run()
        assert len(buffer.batches()) == made * MAX_BATCHES_PER_FOLD
        assert buffer.shard.fold.busy()  # type: ignore[union-attr]
    buffer.shard.run()
    assert len(buffer.batches()) == 2 * MAX_BATCHES_PER_FOLD + 1
    assert not buffer.shard.fold.busy()  # type: ignore[union-attr]


def test_metric_has_staleness_at_consumption_and_at_finish() -> None:
    buffer = Buffer(global_batch=4)
    buffer.publish(0)
    buffer.group(0, under=version(3))
    buffer.shard.run()
    buffer.publish(5)
    buffer.group(1, under=version(7), newest_version=version(10))
    buffer.shard.run()
    (part,) = buffer.log.rows(BATCHES)
    assert part.staleness.to_pylist() == [2, 2, 0, 0]
    assert [r.staleness for r in buffer.log.rows(SETTLED)] == [2, 2, 0, 0]
    (metric,) = buffer.log.rows(METRICS)
    histograms = {name: count for name, count in metric.values.items() if name.startswith("staleness")}
    assert histograms == {"staleness/0": 2, "staleness/2": 2, "staleness_at_finish/0": 2, "staleness_at_finish/3": 2}
    assert metric.values["buffer/trajectories"] == 0.0


def test_batch_has_enough_trainable_members() -> None:
    buffer = Buffer(global_batch=5)
    for number in range(3):
        question = prompt(number, 3)
        buffer.score(*(experience(trajectory(question, member)) for member in (0, 1)), experience(failed(question, 2)))
    buffer.shard.run()
    assert buffer.batches() == [("p0.0", "p0.1", "p1.0", "p1.1", "p2.0", "p2.1")]
    assert Counter(buffer.outcomes().values())["failed"] == 3


def test_group_of_failures_is_settled_without_a_batch() -> None:
    buffer = Buffer(global_batch=2)
    question = prompt(0, 3)
    buffer.score(*(experience(failed(question, member)) for member in range(3)))
    buffer.shard.run()
    assert buffer.outcomes() == dict.fromkeys(("p0.0", "p0.1", "p0.2"), "failed")
    assert buffer.batches() == []


def test_partly_failed_group_completes_after_a_restart() -> None:
    buffer = Buffer(global_batch=1)
    question = prompt(0, 3)
    buffer.score(experience(failed(question, 0)), experience(trajectory(question, 1)))
    buffer.shard.run()
    buffer.shard.run()
    buffer.shard.start()
    buffer.score(experience(trajectory(question, 2)))
    buffer.shard.run()
    assert buffer.batches() == [("p0.1", "p0.2")]


def test_restart_ignores_a_settled_record_with_a_foreign_id() -> None:
    buffer = Buffer(global_batch=2)
    buffer.group(0, samples=3)
    buffer.shard.run()
    buffer.log.append(SETTLED, settled("yesterday", 3, "dropped"), "")
    buffer.shard.start()
    buffer.group(1, samples=3)
    buffer.shard.run()
    assert buffer.batches() == [("p0.0", "p0.1", "p0.2"), ("p1.0", "p1.1", "p1.2")]


@pytest.mark.parametrize("drop", [True, False])
def test_over_age_member_is_trained_or_dropped_as_configured(drop: bool) -> None:
    buffer = Buffer(global_batch=4, max_staleness=1, over_age="drop" if drop else "correct")
    buffer.publish(5)
    question = prompt(0, 2)
    buffer.score(
        experience(trajectory(question, 0, under=version(3))), experience(trajectory(question, 1, under=version(4)))
    )
    buffer.group(2, under=version(5))
    buffer.shard.run()
    if not drop:
        assert buffer.batches() == [("p0.0", "p0.1", "p2.0", "p2.1")]
        return
    (record,) = buffer.log.rows(SETTLED)
    assert (record.trajectory_id, record.outcome, record.reason) == ("p0.0", "dropped", "staleness 2 > 1")
    assert buffer.batches() == []
    buffer.shard.start()
    buffer.group(4, under=version(5))
    buffer.shard.run()
    assert buffer.batches() == [("p0.1", "p2.0", "p2.1", "p4.0", "p4.1")]


@pytest.mark.parametrize("policy", ["train", "drop"])
@pytest.mark.parametrize("restart", [True, False])
def test_expired_group_leaves_and_late_members_are_dropped(policy: str, restart: bool) -> None:
    buffer = Buffer(global_batch=2, group_timeout_s=10, partial_groups=policy)
    fold: Any = buffer.shard.fold
    fold._clock = lambda: 0.0
    question = prompt(0, 4)
    buffer.score(*(experience(trajectory(question, member)) for member in (0, 2)))
    buffer.shard.run()
    fold._clock = lambda: 9.0
    assert buffer.shard.run() == []
    fold._clock = lambda: 10.0
    buffer.shard.run()
    assert buffer.batches() == ([("p0.0", "p0.2")] if policy == "train" else [])
    if restart:
        buffer.shard.start()
    buffer.score(*(experience(trajectory(question, member)) for member in (3, 1)))
    buffer.shard.run(2)
    late = dict.fromkeys(("p0.3", "p0.1"), "dropped")
    assert buffer.outcomes() == dict.fromkeys(("p0.0", "p0.2"), "batched" if policy == "train" else "dropped") | late
    reasons = {r.trajectory_id: r.reason for r in buffer.log.rows(SETTLED)}
    assert reasons["p0.1"] == "late: its group had left the buffer"
    assert reasons["p0.0"] == ("" if policy == "train" else "2 of 4 members arrived in 10 s")
    buffer.shard.start()
    assert not buffer.shard.fold._settlements._left  # type: ignore[union-attr]


def test_member_refused_by_a_writer_is_settled_with_the_reason() -> None:
    buffer = Buffer(global_batch=1, writers=(Component("finished"), Component("bounded", {"tokens": 6})))
    question = prompt(0, 3)
    rows = (trajectory(question, 0), trajectory(question, 1, finish_reason="length"), trajectory(question, 2, tokens=4))
    buffer.score(*map(experience, rows))
    buffer.shard.run()
    assert buffer.batches() == [("p0.0",)]
    reasons = {r.trajectory_id: (r.outcome, r.reason) for r in buffer.log.rows(SETTLED)}
    assert reasons == {
        "p0.0": ("batched", ""),
        "p0.1": ("dropped", "cut off after 2 tokens"),
        "p0.2": ("dropped", "7 tokens are more than 6"),
    }


def test_group_refused_by_the_sampler_is_settled_with_the_reason() -> None:
    buffer = Buffer(global_batch=2, sampler=Component("dynamic"))
    for number, rewards in enumerate([(1.0, 1.0), (0.0, 0.0), (0.5, 0.5), (0.5, 0.6)]):
        question = prompt(number, 2)
        buffer.score(*(experience(trajectory(question, m), reward) for m, reward in enumerate(rewards)))
    buffer.shard.run()
    assert buffer.batches() == [("p3.0", "p3.1")]
    assert Counter(r.reason for r in buffer.log.rows(SETTLED)) == {"": 2, "all rewards of the group are equal": 6}


def test_buffer_reports_what_it_drops_while_no_batch_is_full() -> None:
    buffer = Buffer(global_batch=4, sampler=Component("dynamic"))
    for number in range(3):
        buffer.group(number)
        buffer.shard.run()
    (metric,) = buffer.log.rows(METRICS)
    reasons = [name for name in metric.values if name.startswith("dropped_since_batch")]
    assert (metric.step, metric.values["unfilled_batches"], metric.values["batches"]) == (0, 1.0, 0.0)
    assert reasons == ['dropped_since_batch{text="all rewards of the group are equal"}']
    assert metric.values[reasons[0]] == 4.0


def test_full_buffer_drops_the_oldest_group_and_its_late_members() -> None:
    buffer = Buffer(global_batch=9, evictions=(Component("capacity", {"trajectories": 4}),))
    buffer.score(experience(trajectory(prompt(0, 3), 0)))
    for number in (2, 4):
        buffer.group(number)
    buffer.shard.run()
    assert buffer.outcomes() == dict.fromkeys(("p2.0", "p2.1"), "dropped")
    buffer.group(6)
    buffer.group(8)
    buffer.group(10)
    buffer.shard.run()
    buffer.shard.start()
    buffer.score(experience(trajectory(prompt(0, 3), 1)))
    buffer.shard.run()
    assert set(buffer.outcomes()) == {f"p{number}.{member}" for number in (2, 4, 6, 8) for member in (0, 1)}


def test_micro_batch_columns_match_its_members() -> None:
    buffer = Buffer(global_batch=6)
    for member in range(2):
        for number in range(3):
            tokens = 1 + number + member
            response = Response(
                token_ids([10 * number + member] * tokens), floats([-number - 1.0] * tokens), flags([True] * tokens)
            )
            sampling = replace(SAMPLING, temperature=0.5 + number)
            question = prompt(number, 2, token_ids=token_ids([100 + number] * (number + 1)), sampling=sampling)
            ended = "length" if number == member else "stop"
            buffer.score(
                experience(trajectory(question, member, response=response, finish_reason=ended), float(number))
            )
    buffer.shard.run()
    (part,) = buffer.log.rows(BATCHES)
    start = 0
    for name, length, question, reward, temperature, truncated in zip(
        part.trajectory_ids,
        part.lengths.to_pylist(),
        part.prompt_lengths.to_pylist(),
        part.rewards.to_pylist(),
        part.temperatures.to_pylist(),
        part.truncated.to_pylist(),
        strict=True,
    ):
        key = parse_trajectory_id(name)
        number, answered = key.number, 1 + key.number + key.member
        ids = part.token_ids.to_pylist()[start : start + length]
        assert ids == [100 + number] * (number + 1) + [10 * number + key.member] * answered
        assert part.logprobs.to_pylist()[start : start + length] == [0.0] * question + [-number - 1.0] * answered
        assert part.loss_mask.to_pylist()[start : start + length] == [False] * question + [True] * answered
        assert (reward, temperature, truncated) == (number, 0.5 + number, number == key.member)
        start += length
    assert start == len(part.token_ids)
    lineage = zip(part.lineage_partitions.to_pylist(), part.lineage_offsets.to_pylist(), strict=True)
    for name, (partition, offset) in zip(part.trajectory_ids, lineage, strict=True):
        (source,) = buffer.log.received(PartitionKey(EXPERIENCES.short_name, partition), offset, offset + 1)
        assert source.record.trajectory.trajectory_id == name


def test_duplicate_experience_is_ignored() -> None:
    buffer = Buffer(global_batch=2)
    question = prompt(0)
    buffer.score(experience(trajectory(question, 0)), experience(trajectory(question, 0)))
    assert buffer.shard.run() == []
    buffer.score(experience(trajectory(question, 1)))
    buffer.shard.run()
    buffer.score(experience(trajectory(question, 1)))
    assert buffer.shard.run() == []
    buffer.shard.start()
    buffer.score(experience(trajectory(question, 0)))
    assert buffer.shard.run() == []
    assert buffer.batches() == [("p0.0", "p0.1")]


def test_no_batch_is_made_before_the_input_is_caught_up() -> None:
    buffer = Buffer(global_batch=2)
    buffer.group(0)
    buffer.publish(1)
    buffer.shard.start()
    experiences = [place for place in buffer.shard.places if place.topic == EXPERIENCES.short_name]
    assert buffer.shard.turn(only=experiences) == ()
    assert len(buffer.shard.run()) > 0
    assert buffer.log.rows(BATCHES)[0].staleness.to_pylist() == [1, 1]


def test_ledger_ignores_evaluations_in_the_settled_topic() -> None:
    buffer = Buffer(global_batch=2)
    buffer.group(0)
    buffer.shard.run()
    for number in range(50, 60):
        buffer.log.append(SETTLED, settled(f"e{number}.0", 1, "evaluated"))
    buffer.shard.start()
    buffer.group(1)
    buffer.shard.run()
    buffer.shard.run()
    note = buffer.log.committed(buffer.shard.config.group)
    assert not [name for name in note.state["settled"] if name.startswith("e")]
    assert note.ledger["settled:0"] > 10


def test_micro_batches_are_bounded_by_tokens_and_counted() -> None:
    buffer = Buffer(global_batch=4, micro_batch_tokens=12)
    buffer.group(0, 4, tokens=3)  # six tokens each, prompt included
    buffer.score(experience(trajectory(prompt(2, 1), 0, tokens=40)))
    buffer.shard.run()
    parts: list[MicroBatch] = buffer.log.rows(BATCHES)
    assert [(p.index, p.count, p.lengths.to_pylist()) for p in parts] == [(0, 2, [6, 6]), (1, 2, [6, 6])]
    assert [len(p.token_ids) for p in parts] == [12, 12]
    first = parts[0]
    assert first.token_ids.to_pylist() == [1, 2, 3, 5, 5, 5] * 2
    assert np.allclose(first.logprobs.to_numpy(), [0, 0, 0, -0.5, -0.5, -0.5] * 2)
    assert first.loss_mask.to_pylist() == [False, False, False, True, True, True] * 2
    assert first.prompt_lengths.to_pylist() == [3, 3]
    assert (first.lineage_partitions.to_pylist(), first.lineage_offsets.to_pylist()) == ([0, 0], [0, 1])


@pytest.mark.parametrize(
    ("lengths", "parts"),
    [
        ([], []),
        ([5, 5], [[0, 1]]),
        ([5, 6], [[0], [1]]),
        ([40, 3, 3], [[0], [1, 2]]),
        ([3, 40, 3], [[0], [1], [2]]),
        ([10, 10], [[0], [1]]),
    ],
)
def test_split_by_tokens_keeps_order_and_isolates_long_sequences(lengths: list[int], parts: list[list[int]]) -> None:
    assert [list(part) for part in split_by_tokens(lengths, 10)] == parts


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("global_batch", 0),
        ("max_staleness", -1),
        ("micro_batch_tokens", 0),
        ("micro_batch_tokens", MAX_MICRO_BATCH_TOKENS + 1),
    ],
)
def test_config_names_the_field_that_does_not_fit(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=field):
        ExperienceConfig(**{field: value})


@pytest.mark.parametrize("seed", range(30))
def test_restarts_lose_nothing_and_settle_nothing_twice(seed: int) -> None:
    rng = random.Random(seed)
    buffer = Buffer(global_batch=rng.choice([1, 5, 8]), max_staleness=1, over_age=rng.choice(["correct", "drop"]))
    waiting = [(number, member) for number in range(24) for member in range(3)]
    rng.shuffle(waiting)
    newest = 0
    while waiting or rng.random() < 0.9:
        what = rng.random()
        if what < 0.4 and waiting:
            number, member = waiting.pop()
            buffer.score_drawn(rng, prompt(number, 3), member, newest - 3, newest)
        elif what < 0.45:
            newest += 1
            buffer.publish(newest)
        elif what < 0.55:
            buffer.shard.start()
        elif what < 0.85:
            buffer.shard.turn(rng.choice([1, 3, 99]), rng.sample(buffer.shard.places, rng.randint(1, 3)))
        else:
            buffer.shard.commit()
    for _ in range(3):
        buffer.shard.run()
    while buffer.shard.fold.busy():
        buffer.shard.run()
    batched = [name for batch in buffer.batches() for name in batch]
    outcomes = buffer.outcomes()
    assert sorted(batched) == sorted(name for name, outcome in outcomes.items() if outcome == "batched")
    least = buffer.shard.fold._config.global_batch
    assert all(len(batch) >= least for batch in buffer.batches())
    groups = [{parse_trajectory_id(name).number for name in batch} for batch in buffer.batches()]
    assert sum(map(len, groups)) == len(set().union(*groups))
    assert 72 - len(outcomes) < max(least, 1)
    assert sum(map(len, buffer.shard.fold._settlements._held.values())) == 72 - len(outcomes)
