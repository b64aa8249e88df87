"""Synthetic metrics and records of a run, for tests of views and reports."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pipelines.inspect.metrics_file import version_metric
from schemas.records import Metric, PolicyVersion, ReplicaStatus, WeightVersion

START = 1_700_000_000_000
STEPS = 80
GROUP_BATCH = 128
STEP_MS = 1_200


def trainer_metric(step: int, reward: float | None = None) -> Metric:
    """One optimizer step of 128 trajectories; by default the reward rises from 0.2 to 0.9."""
    values = {
        "reward/mean": 0.9 - 0.7 * math.exp(-step / 12) + 0.03 * math.sin(step) if reward is None else reward,
        "reward/std": 0.4,
        "response_length/mean": 12 + step / 8,
        "response_length/max": 37.0,
        "staleness/mean": 0.8,
        "staleness/max": 2.0 if step < 50 else 3.0,
        "trajectories": float(step * GROUP_BATCH),
        "tokens": 4_000.0,
        "time/update": 0.3,
    }
    return Metric("trainer", step, values, START + 20_000 + step * STEP_MS)


def evaluation_metric(version: int, mode: str, accuracy: float, final: bool = False) -> Metric:
    """Held-out accuracy of one version in one mode, as the evaluation pipeline writes it."""
    values = {f"accuracy/{mode}": accuracy, "questions": 256.0, "final": float(final)}
    return Metric("evaluation", version, values, START + 20_500 + version * STEP_MS)


def experience_metric(batch: int) -> Metric:
    """A batch's staleness histogram: most trajectories are fresh."""
    finish = {"staleness_at_finish/0": 100.0, "staleness_at_finish/1": 28.0}
    dropped = {f"dropped_share/{decile}": decile / 100 for decile in range(1, 11)}
    values = {
        **finish,
        **dropped,
        "over_age": 16.0,
        "staleness/0": 40.0,
        "staleness/1": 72.0,
        "staleness/2": 16.0,
        "buffer/trajectories": 90.0,
    }
    return Metric("experience", batch, {**values, "buffer/groups": 11.0, "dropped_stale": 0.0}, START + batch)


def heartbeat(replica: int, at: int, tokens: int, incarnation: int = 1, pid: int = 41) -> ReplicaStatus:
    """A running replica with 12 of 16 slots in use."""
    return ReplicaStatus(
        replica, 0, incarnation, "running", PolicyVersion(1, 12), 12, 3, 16, 330, 768, tokens, 0.01, "host", pid, at
    )


def manifest(epoch: int, number: int) -> WeightVersion:
    """A published weight version."""
    at = START + 20_000 + number * STEP_MS
    return WeightVersion(PolicyVersion(epoch, number), None, number, "w", 8, "00" * 32, (), (), (0,), 0, False, at)


def history(steps: int = STEPS) -> Iterator[Metric]:
    """The content of metrics.jsonl for a run of `steps` steps, with phases, replicas and lag."""
    for index, (phase, seconds) in enumerate([("warm_start", 0), ("starting", 12), ("training", 18)]):
        yield Metric("phase", index, {phase: 1.0}, START + seconds * 1000)
    for step, accuracy in ((500, 0.62), (1000, 0.94), (1060, 0.24)):
        values = {"accuracy/greedy": accuracy, "accuracy/sampled": accuracy - 0.05, "progress": step / 1060}
        yield Metric("warm_start", step, values, START + step * 10)
    yield version_metric(manifest(1, 0))
    yield evaluation_metric(0, "greedy", 0.24)
    yield evaluation_metric(0, "sampled", 0.2)
    for step in range(1, steps + 1):
        yield experience_metric(step - 1)
        metric = trainer_metric(step)
        yield metric
        yield version_metric(manifest(1, step))
        at = metric.measured_at
        for replica in (0, 1):
            values = {
                "running": 12.0,
                "capacity": 16.0,
                "kv_capacity": 768.0,
                "incarnation": 1.0,
                "version": step - 1.0,
            }
            values |= {"kv_used": 400 + 200 * math.sin(step / 3 + replica), "tokens_generated": 900.0 * step}
            yield Metric("replica", replica, {**values, "waiting": 2.0}, at)
        yield Metric(
            "lag", 0, {"inbox": 8 + 4 * math.cos(step / 5), "experiences": 3.0, "batches": float(step % 2)}, at
        )
        if step % 20 == 0:
            yield evaluation_metric(step, "greedy", 0.3 + 0.007 * step, final=step == steps)
            yield evaluation_metric(step, "sampled", 0.25 + 0.007 * step, final=step == steps)
    end = START + 20_000 + steps * STEP_MS
    for index, (phase, seconds) in enumerate([("final_evaluation", 1), ("draining", 6), ("audit", 9)], 3):
        yield Metric("phase", index, {phase: 1.0}, end + seconds * 1000)
