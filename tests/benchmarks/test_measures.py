"""benchmarks/measures.py: speed and reward of a training run."""

from __future__ import annotations

import pytest

from benchmarks.measures import Step, median, outside, seconds_a_batch, seconds_to, skipped_share, spread


def _steps(ended: list[float], rewards: list[float] | None = None, each: int = 128) -> list[Step]:
    rewards = rewards or [0.0] * len(ended)
    return [Step(i, e, r, i * each) for i, (e, r) in enumerate(zip(ended, rewards, strict=True), 1)]


def test_seconds_a_batch_ignores_start_up_steps() -> None:
    steps = _steps([100, 200, 300, 400, 401, 402, 404, 405])
    assert seconds_a_batch(steps, 128) == (1.0, pytest.approx(4 / 3))


def test_seconds_a_batch_scales_by_trajectories() -> None:
    assert seconds_a_batch(_steps([0, 0, 0, 0, 1, 3], each=256), 128) == (1.0, 1.0)


def test_seconds_a_batch_is_none_for_start_up_alone() -> None:
    assert seconds_a_batch(_steps([1, 2, 3, 4, 5]), 128) is None


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.8, 0.8, 0.8, 0.8], 2),  # at the first full window
        ([0.0, 1.0, 0.5, 1.2], 4),  # the mean of the last two batches, not one high batch
        ([0.9, 0.1, 0.9, 0.1], None),
        ([1.0], None),
    ],
)
def test_seconds_to_uses_the_trailing_mean(rewards: list[float], expected: float | None) -> None:
    steps = _steps([float(i) for i in range(1, len(rewards) + 1)], rewards)
    assert seconds_to(steps, 0.8, 2) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [([3.0, 1.0, 2.0], 2.0), ([1.0, 2.0], 1.5), ([1.0, None, 2.0], 2.0), ([None, None, 1.0], None), ([], None)],
)
def test_median_orders_none_last(values: list[float | None], expected: float | None) -> None:
    assert median(values) == expected


def test_spread_counts_the_known_values() -> None:
    assert spread([0.5, None, 0.25, 1.0]) == (0.25, 0.5, 1.0, 3)
    assert spread([None]) is None


def test_skipped_share_is_of_all_trajectories() -> None:
    batches = [{"batch/skipped_rows": skipped, "batch/trajectories": 32.0} for skipped in (8.0, 0.0, 16.0)]
    assert skipped_share(batches) == 0.25
    assert skipped_share([]) is None


def test_outside_is_the_share_without_model_code() -> None:
    assert outside(9.0, 10.0) == pytest.approx(0.1)
    assert outside(0.0, 0.0) is None
