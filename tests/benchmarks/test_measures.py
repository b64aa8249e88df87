"""The arithmetic of benchmarks/end_to_end.py."""

from __future__ import annotations

import pytest

from benchmarks.measures import Step, median, outside, seconds_a_batch, seconds_to


def _steps(ended: list[float], rewards: list[float] | None = None, each: int = 128) -> list[Step]:
    rewards = rewards or [0.0] * len(ended)
    return [Step(i, e, r, i * each) for i, (e, r) in enumerate(zip(ended, rewards, strict=True), 1)]


def test_start_up_steps_do_not_count() -> None:
    steps = _steps([100, 200, 300, 400, 401, 402, 404, 405])
    assert seconds_a_batch(steps, 128) == (1.0, pytest.approx(4 / 3))


def test_larger_batches_count_by_their_trajectories() -> None:
    assert seconds_a_batch(_steps([0, 0, 0, 0, 1, 3], each=256), 128) == (1.0, 1.0)


def test_a_run_of_start_up_alone_has_no_speed() -> None:
    assert seconds_a_batch(_steps([1, 2, 3, 4, 5]), 128) is None


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.8, 0.8, 0.8, 0.8], 2),  # as soon as there are enough batches
        ([0.0, 1.0, 0.5, 1.2], 4),  # the mean of the last two, not one high batch
        ([0.9, 0.1, 0.9, 0.1], None),
        ([1.0], None),
    ],
)
def test_time_to_a_reward_is_that_of_the_trailing_mean(rewards: list[float], expected: float | None) -> None:
    steps = _steps([float(i) for i in range(1, len(rewards) + 1)], rewards)
    assert seconds_to(steps, 0.8, 2) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [([3.0, 1.0, 2.0], 2.0), ([1.0, 2.0], 1.5), ([1.0, None, 2.0], 2.0), ([None, None, 1.0], None), ([], None)],
)
def test_a_seed_that_never_got_there_is_later_than_all(values: list[float | None], expected: float | None) -> None:
    assert median(values) == expected


def test_outside_is_what_model_code_leaves() -> None:
    assert outside(9.0, 10.0) == pytest.approx(0.1)
    assert outside(0.0, 0.0) is None
