"""The guarantees of each `over_age` setting in simulated runs with crashes and pauses, drawn by hypothesis."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pipeline_simulation import PipelineSimulation
from record_factories import experience, failed, prompt, version
from sharded_buffer_harness import Buffers
from simulation_config import SimulationConfig

from operators.experience.config import Component, ExperienceConfig
from pipelines.config import ConfigError, parse_config
from schemas.records import BatchProposal, MicroBatch
from schemas.topics import BATCH_ASSEMBLY, BATCHES, METRICS, RELAY, SETTLED


def shapes(over_age: str) -> st.SearchStrategy[SimulationConfig]:
    return st.builds(
        lambda samples, batch, staleness, processes, longest: SimulationConfig(
            prompts=16,
            samples=samples,
            global_batch=batch,
            staleness=staleness,
            processes=processes,
            longest=longest,
            failing=1000,
            over_age=over_age,  # type: ignore[arg-type]
        ),
        st.sampled_from([2, 3]),
        st.sampled_from([2, 4, 7]),
        st.sampled_from([0, 1, 2]),
        st.sampled_from([1, 2]),
        st.sampled_from([1, 12, 40]),
    )


def oldest(simulation: PipelineSimulation) -> tuple[int, int]:
    """The largest staleness of a trained trajectory, as recorded, and in versions of the update that trains it."""
    parts: list[MicroBatch] = simulation.log.rows(BATCHES)
    recorded = [age for part in parts for age in part.staleness.to_pylist()]
    trained = [part.batch - number for part in parts for number in part.version_numbers.to_pylist()]
    return max(recorded, default=0), max(trained, default=0)


LOADS_OLDER_WEIGHTS = SimulationConfig(
    prompts=16, samples=2, global_batch=2, staleness=0, processes=1, longest=1, failing=1000, over_age="wait"
)
"""With seed 6380058 a replica loads older weights for evaluation, after its last heartbeat before fresh work."""


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), shape=shapes("wait"))
@example(seed=6380058, shape=LOADS_OLDER_WEIGHTS)
def test_wait_never_trains_over_age_and_completes_all_prompts(seed: int, shape: SimulationConfig) -> None:
    simulation = PipelineSimulation(seed, shape)
    for _ in range(400):
        simulation.step()
    simulation.calm()
    assert max(oldest(simulation)) <= shape.staleness
    asked = {f"p{number}.{member}" for number in range(shape.prompts) for member in range(shape.samples)}
    left = asked - {record.trajectory_id for record in simulation.log.rows(SETTLED)}
    assert len(left) < shape.global_batch


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), shards=st.integers(1, 3), most=st.integers(0, 2))
def test_drop_never_trains_over_age_and_reports_drops(seed: int, shards: int, most: int) -> None:
    rng = random.Random(seed)
    buffers = Buffers(shards, partitions=3, global_batch=rng.choice([1, 4]), max_staleness=most, over_age="drop")
    waiting = [(number, member) for number in range(12) for member in range(2)]
    rng.shuffle(waiting)
    newest = 0
    while waiting:
        what, one = rng.random(), rng.choice(buffers.shards)
        if what < 0.4:
            number, member = waiting.pop()
            buffers.score_drawn(rng, prompt(number, 2), member, newest - 4, newest)
        elif what < 0.55:
            newest += 1
            buffers.publish(newest)
        elif what < 0.6:
            one.start()
        elif what < 0.85:
            one.turn(rng.choice([1, 99]), rng.sample(one.places, rng.randint(1, len(one.places))))
        else:
            one.commit()
    buffers.run(20)
    trained = [age for part in buffers.log.rows(BATCHES) for age in part.staleness.to_pylist()]
    assert max(trained, default=0) <= most
    reasons = {record.reason for record in buffers.log.rows(SETTLED) if record.outcome == "dropped"}
    assert all(reason.startswith(("staleness ", "late: ", "one of 2 members is left")) for reason in reasons)


def test_drop_covers_batches_selected_before_a_newer_version() -> None:
    buffers = Buffers(shards=2, partitions=2, global_batch=2, max_staleness=0, over_age="drop")
    buffers.publish(0)
    for number in range(2):
        buffers.group(number, samples=1)
    first, second = buffers.shards
    for shard in (first, second, first):  # each proposes, then the first selects
        shard.run()
    buffers.publish(1)
    buffers.run()
    assert [sorted(names) for names in buffers.batches()] == [["p0.0", "p1.0"]]
    assert {age for part in buffers.log.rows(BATCHES) for age in part.staleness.to_pylist()} == {0}


def test_drop_takes_the_newest_version_from_a_selection() -> None:
    """A shard that has not read the newest version learns of it from the first one, and does not propose for ever."""
    buffers = Buffers(shards=2, partitions=2, global_batch=2, max_staleness=0, over_age="drop")
    buffers.publish(0)
    for number in range(2):  # trained, so that there can be a version 1
        buffers.group(number, samples=1)
    buffers.run()
    for number in range(3, 7, 2):  # of the second shard
        buffers.group(number, samples=1)
    buffers.publish(1)
    first, second = buffers.shards
    elsewhere = [place for place in second.places if place.topic != RELAY.short_name]
    for _ in range(4):
        second.turn(only=elsewhere)
        second.commit()
        first.run()
    proposals = [record for record in buffers.log.rows(BATCH_ASSEMBLY) if isinstance(record, BatchProposal)]
    assert [3 in record.groups for record in proposals].count(True) == 1
    assert [outcome for name, outcome in buffers.outcomes().items() if name in ("p3.0", "p5.0")] == ["dropped"] * 2


@settings(max_examples=25, deadline=None)
@given(ages=st.lists(st.integers(0, 5), min_size=1, max_size=8), most=st.integers(0, 3))
def test_correct_trains_everything_and_counts_over_age(ages: list[int], most: int) -> None:
    buffers = Buffers(shards=1, partitions=2, global_batch=1, max_staleness=most)
    buffers.publish(5)
    for number, age in enumerate(ages):
        buffers.group(number, samples=1, under=version(5 - age))
    buffers.run(len(ages))
    assert sorted(age for part in buffers.log.rows(BATCHES) for age in part.staleness.to_pylist()) == sorted(ages)
    counted = sum(metric.values["over_age"] for metric in buffers.log.rows(METRICS))
    assert counted == sum(age > most for age in ages)


def test_wait_takes_groups_in_prompt_order() -> None:
    buffers = Buffers(shards=1, partitions=2, global_batch=2, over_age="wait")
    for number in (1, 2):
        buffers.group(number)
    buffers.run()
    assert buffers.batches() == []
    buffers.group(0)
    buffers.run()
    assert [names[0] for names in buffers.batches()] == ["p0.0", "p1.0", "p2.0"]
    buffers.shards[0].start()
    buffers.group(4)
    buffers.run()
    assert len(buffers.batches()) == 3
    buffers.score(*(experience(failed(prompt(3, 2), member)) for member in range(2)))
    buffers.run()
    assert [names[0] for names in buffers.batches()] == ["p0.0", "p1.0", "p2.0", "p4.0"]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"experience": {"over_age": "correct!"}}, "over_age"),
        ({"experience": {"over_age": "wait", "shards": 2}, "kafka": {"partitions": 2}}, "needs shards = 1, not 2"),
        (
            {"experience": {"over_age": "wait"}, "placement": {"refresh": "interrupt"}},
            "placement.refresh = 'interrupt'",
        ),
        ({"experience": {"over_age": "wait"}, "placement": {"refresh": "slot"}}, "placement.refresh = 'slot'"),
        ({"experience": {"over_age": "wait"}, "placement": {"admitted_batches": 4}}, "of at most 3 .*, not 4"),
    ],
)
def test_config_that_breaks_the_bound_raises(table: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(table, "run.toml")


def test_wait_needs_a_sampler_that_keeps_prompt_order() -> None:
    with pytest.raises(ValueError, match="needs sampler 'fifo', not 'newest_first'"):
        ExperienceConfig(over_age="wait", sampler=Component("newest_first"))
