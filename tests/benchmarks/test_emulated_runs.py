"""What benchmarks read off an emulated run, on records of which the answers are known."""

from __future__ import annotations

import pytest

from benchmarks.emulated_runs import RunFailed, measure
from schemas.records import Metric


def _run(steps: int = 6) -> list[Metric]:
    """A step every 10 s, 2 s of it waited for; replica 0 idle half of the time, replica 1 never, KV use ½ and 1."""
    metrics = []
    for step in range(1, steps + 1):
        values = {"tokens": 1000.0, "trajectories": 10.0 * step, "time/wait": 2.0}
        values |= {"staleness/mean": float(step % 2), "staleness/max": float(step % 3)}
        metrics.append(Metric("trainer", step, values, 10_000 * step))
    for second in range(10 * steps + 1):
        for replica in (0, 1):
            busy = replica == 1 or second % 2 == 0
            values = {"tokens_generated": 50.0 * second * (replica + 1), "kv_capacity": 100.0, "waiting": 0.0}
            values |= {"kv_used": 100.0 if replica else 50.0, "running": float(busy)}
            metrics.append(Metric("replica", replica, values, 1000 * second))
    return metrics


def test_figures_are_of_the_time_after_the_warm_up_in_emulated_seconds_and_real_tokens() -> None:
    spans = [(0, 5_000), (20_000, 24_000), (30_000, 38_000)]  # the first ended before
    ran = measure(_run(), spans, time_scale=10.0, stride=8)
    assert ran.seconds == 400.0
    assert ran.trained_tokens_per_s == pytest.approx(4 * 1000 * 8 / 400)
    assert ran.generated_tokens_per_s == pytest.approx(150 * 8 / 10)
    assert ran.kv_use == pytest.approx(0.75)
    assert ran.latency_s == pytest.approx(60.0)
    assert (ran.staleness_mean, ran.staleness_max) == (0.5, 2.0)
    assert ran.trainer_idle == pytest.approx(0.2)
    assert ran.rollout_idle == pytest.approx(0.25)
    assert ran.bubbles == pytest.approx(0.225)


def test_too_short_a_run_measures_nothing() -> None:
    with pytest.raises(RunFailed, match="3 optimizer steps are too few"):
        measure(_run(3), [], 1.0, 1)
