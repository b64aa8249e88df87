"""The order of the buffer: by the log and its own monotonic clock, never by times that other machines wrote."""

from __future__ import annotations

from typing import Any

from buffer_harness import Buffer
from hypothesis import given, settings
from hypothesis import strategies as st
from record_factories import experience, prompt, trajectory, version

from operators.experience.config import Component

HOUR = 3_600_000
TIMES = st.sampled_from([-(2**63), -1, 0, 1_800_000_000_000, 2**62, 2**63 - 1])


def score(buffer: Buffer, number: int, at: int, under: int = 0, **how: Any) -> None:
    question = prompt(number, 2)
    rows = (trajectory(question, member, under=version(under), finished_at=at, **how) for member in range(2))
    buffer.score(*(experience(row, scored_at=at) for row in rows))


def test_buffer_ignores_the_clock_of_the_scorer() -> None:
    buffer = Buffer(global_batch=8)
    for number in range(2):
        score(buffer, number, 1000 + HOUR)
    for batch in range(1, 11):
        for number in range(4 * batch - 2, 4 * batch + 2):
            score(buffer, number, 1000 + batch)
        buffer.shard.run()
    members = [f"p{number}.{member}" for number in range(40) for member in range(2)]
    assert sorted(name for batch in buffer.batches() for name in batch) == sorted(members)
    assert {name for batch in buffer.batches()[:1] for name in batch} == set(members[:8])


@settings(max_examples=6, deadline=None)
@given(times=st.lists(TIMES, min_size=12, max_size=12))
def test_batches_do_not_depend_on_times_in_records(times: list[int]) -> None:
    def batches(times: list[int]) -> list[tuple[str, ...]]:
        evictions = (Component("age", {"seconds": 3600.0}),)
        buffer = Buffer(global_batch=4, evictions=evictions)
        for number, at in enumerate(times):
            if number % 4 == 0:
                buffer.publish(number // 4)
            score(buffer, number, at, under=number // 4)
            if number % 3 == 0:
                buffer.shard.run()
        buffer.shard.run(3)
        return buffer.batches()

    assert batches(times) == batches([0] * len(times))


def test_buffer_orders_partitions_by_weight_version() -> None:
    buffer = Buffer(global_batch=2)
    for number in range(1, 60, 2):  # one partition is far ahead of the other
        score(buffer, number, 0, under=0)
    buffer.shard.run(20)
    buffer.shard.crash()
    score(buffer, 61, 0, under=1)
    score(buffer, 0, 0, under=2)
    buffer.shard.start()
    buffer.shard.run(2)
    assert [names[0] for names in buffer.batches()[-2:]] == ["p61.0", "p0.0"]


def test_group_with_an_impossible_version_does_not_wait_for_ever() -> None:
    buffer = Buffer(global_batch=2)
    score(buffer, 0, 0, newest_version=version(2**60))
    score(buffer, 1, 0)
    score(buffer, 3, 0)
    buffer.shard.run()
    assert [names[0] for names in buffer.batches()] == ["p0.0", "p1.0", "p3.0"]
