"""Simulated scale-ups: when nodes serve, and that no arm serves more than its nodes can."""

from __future__ import annotations

import pytest

from benchmarks.elastic_simulation import BLOCKS, MODELS, Burst, binary_tree, simulate
from benchmarks.relay_simulation import arrivals

LARGE, RATE = MODELS[-1], 18e9
BURST = Burst(sources=4, seconds=2.0, load=0.5, delay_s=0.0, init_s=0.3)


def test_binary_tree_sends_each_block_twice() -> None:
    at = arrivals(binary_tree(7, 10), 1, 7, 10, 1.0)
    assert at[1:3, -1].tolist() == [19.0, 20.0]
    assert at.max() == 22.0


def test_stages_serve_after_their_share_of_the_transfer() -> None:
    whole = LARGE.gigabytes * 1e9 / RATE
    staged, full = (simulate(LARGE, 8, RATE, BURST, arm) for arm in ("staged", "full"))
    assert full.first_s == pytest.approx(whole, rel=0.05)
    assert staged.first_s < 0.35 * whole
    assert staged.ttft_p99 < 0.5 * full.ttft_p99
    assert staged.gpu_seconds < full.gpu_seconds


def test_delay_of_the_stages_leaves_no_gain_on_fast_links() -> None:
    slow = Burst(4, 2.0, 0.5, delay_s=1.0, init_s=0.3)
    staged, full = (simulate(MODELS[0], 8, RATE, slow, arm) for arm in ("staged", "full"))
    assert staged.ttft_p99 == pytest.approx(full.ttft_p99)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_parts_of_a_model_cover_its_blocks(model: object) -> None:
    parts = model.parts  # type: ignore[attr-defined]
    assert set().union(parts.ends, *parts.layers) == set(range(BLOCKS))


def test_requests_wait_for_the_capacity_of_all_before_them() -> None:
    """A burst of twice the capacity takes twice its time."""
    burst = Burst(4, 4.0, 2.0, 0.0, 0.0)
    result = simulate(MODELS[0], 8, 1e15, burst, "full")
    assert result.gpu_seconds == pytest.approx(4 * 8.0, rel=0.05)
    assert result.ttft_p50 == pytest.approx(2.0, rel=0.1)
