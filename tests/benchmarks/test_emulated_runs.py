"""benchmarks/emulated_runs.py: measurements of an emulated run, on records with known results."""

from __future__ import annotations

import math

import pytest

from benchmarks.emulated_runs import RunFailed, measure
from schemas.records import Metric


def _run(steps: int = 6) -> list[Metric]:
    """A step every 10 s with 2 s of waiting; replica 0 is idle half of the time, replica 1 never; KV use ½ and 1."""
    metrics = []
    for step in range(1, steps + 1):
        values = {"tokens": 1000.0, "trajectories": 10.0 * step, "time/wait": 2.0}
        values |= {"staleness/mean": float(step % 2), "staleness/max": float(step % 3)}
        metrics.append(Metric("trainer", step, values, 10_000 * step))
    for second in range(10 * steps + 1):
        metrics.append(Metric("rollout", 0, {"rollout/busy_seconds": 1.5 * second}, 1000 * second))
        for replica in (0, 1):
            busy = replica == 1 or second % 2 == 0
            values = {"tokens_generated": 50.0 * second * (replica + 1), "kv_capacity": 100.0, "waiting": 0.0}
            values |= {"kv_used": 100.0 if replica else 50.0, "running": float(busy)}
            metrics.append(Metric("replica", replica, values, 1000 * second))
    return metrics


def test_measure_counts_emulated_time_after_the_warm_up() -> None:
    spans = [(0, 5_000), (20_000, 24_000), (30_000, 38_000)]  # the first finished during the warm-up
    run = measure(_run(), spans, time_scale=10.0, stride=8)
    assert run.seconds == 400.0
    assert run.trained_tokens_per_s == pytest.approx(4 * 1000 * 8 / 400)
    assert run.generated_tokens_per_s == pytest.approx(150 * 8 / 10)
    assert run.kv_use == pytest.approx(0.75)
    assert run.latency_s == pytest.approx(60.0)
    assert (run.staleness_mean, run.staleness_max) == (0.5, 2.0)
    assert run.trainer_idle == pytest.approx(0.2)
    assert run.rollout_idle == pytest.approx(0.25)
    assert run.bubbles == pytest.approx(0.225)


def test_measure_rejects_a_run_with_too_few_steps() -> None:
    with pytest.raises(RunFailed, match="3 optimizer steps are too few"):
        measure(_run(3), [], 1.0, 1)


def test_measure_of_a_run_without_two_heartbeats_has_no_kv_use() -> None:
    """As of a run of seconds on a busy machine."""
    beats = [each for each in _run() if each.name != "replica" or each.measured_at == 30_000]
    assert math.isnan(measure(beats, [], 1.0, 1).kv_use)
