"""Whole emulated runs for benchmarks, on a Kafka of their own, and what their logs say of them."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from infra.kafka.broker import BrokerConfig, start_broker
from infra.kafka.properties import ClientProperties
from infra.kafka.reading import read_topic
from pipelines.config import load_config
from pipelines.report.metrics_file import read_metrics
from pipelines.report.series import Batch, batches
from schemas.records import Metric, Progress, RepackPlan
from schemas.topics import PLANS, PROGRESS, TRAJECTORIES

WARM_UP = 2
"""Optimizer steps before the measured time: pipelines that fill, replicas that begin all at once."""
LIMIT_S = 1800.0


class RunFailed(RuntimeError):
    """A run did not reach its goal, or its books did not balance."""


@dataclass(frozen=True, slots=True)
class Ran:
    """One run, measured from the end of step `WARM_UP` to that of the last; real tokens, emulated seconds."""

    seconds: float
    trained_tokens_per_s: float
    """Tokens of global batches, prompts included, by time: the paper's throughput."""
    generated_tokens_per_s: float
    kv_use: float
    """Mean over replicas and time."""
    latency_s: float
    """Mean from a trajectory's start to its finish."""
    staleness_mean: float
    staleness_max: float
    trainer_idle: float
    rollout_idle: float
    """Shares of time: of the trainer without a batch, of replicas without a request."""
    planned: int = 0
    moved: int = 0
    """Trajectories that were to move, and that did, over the whole run; counted once a move."""
    hand_over_s: float = math.nan
    """Median from a plan to the hand-over of what it names, in seconds that are not emulated."""

    @property
    def bubbles(self) -> float:
        """The share of the accelerators' time that is idle, where trainer and rollouts have as many each."""
        return (self.trainer_idle + self.rollout_idle) / 2

    def to_json(self) -> dict[str, float]:
        """Everything, by name."""
        return {**asdict(self), "bubbles": self.bubbles}


def run_emulated(example: Path, name: str, folder: Path, changes: Sequence[str]) -> Ran:
    """Run `example` with `changes` ("section.key=value") as run `name` in `folder`, which must not have it yet.

    Raises RunFailed with what the run said.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with start_broker(BrokerConfig(folder / f"kafka-{name}")) as broker:
        everything = [*changes, f"run.name={name}", f"run.folder={folder}"]
        everything.append(f"kafka.bootstrap_servers={broker.bootstrap_servers}")
        sets = [word for change in everything for word in ("--set", change)]
        command = [sys.executable, "-W", "ignore", "-c", "from pipelines.cli.main import main; main()", "run"]
        done = subprocess.run(
            [*command, str(example), *sets], capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
        if done.returncode:
            raise RunFailed(f"run {name} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
        config = load_config(folder / name / "config.toml")
        metrics = read_metrics(folder / name / "metrics.jsonl")
        client = ClientProperties.at(broker.bootstrap_servers)
        spans, moves = finished_spans(client, name), moves_of(client, name)
    return replace(measure(metrics, spans, config.run.time_scale, config.rollout.emulation.stride), **moves)


def finished_spans(client: ClientProperties, run: str) -> list[tuple[int, int]]:
    """When each trajectory was started and finished, in Unix milliseconds."""
    topic = TRAJECTORIES.name(run)
    return [(row.started_at, row.finished_at) for record in read_topic(client, topic) for row in record.rows]


def moves_of(client: ClientProperties, run: str) -> dict[str, Any]:
    """What was to be moved in `run`, what was, and how long it took: fields of Ran."""
    plans = _rows(client, PLANS.name(run), RepackPlan)
    planned: dict[str, list[int]] = defaultdict(list)
    for plan in plans:
        for name in (name for move in plan.moves for name in move.trajectory_ids):
            planned[name].append(plan.planned_at)
    given = [told for told in _rows(client, PROGRESS.name(run), Progress) if told.next_owner is not None]
    took = []
    for told in given:
        before = [at for at in planned[told.trajectory_id] if at <= told.written_at]
        took += [(told.written_at - before[-1]) / 1000] if before else []
    return {
        "planned": sum(map(len, planned.values())),
        "moved": len(given),
        "hand_over_s": statistics.median(took) if took else math.nan,
    }


def _rows(client: ClientProperties, topic: str, kind: type) -> list[Any]:
    return [row for record in read_topic(client, topic) for row in record.rows if isinstance(row, kind)]


def measure(metrics: Sequence[Metric], spans: Sequence[tuple[int, int]], time_scale: float, stride: int) -> Ran:
    """What a run's metrics and its trajectories' `spans` say. Raises RunFailed where there are too few steps."""
    steps = batches(metrics)
    if len(steps) < WARM_UP + 2:
        raise RunFailed(f"{len(steps)} optimizer steps are too few to measure: {WARM_UP + 2} at least")
    begin, end = steps[WARM_UP - 1].at, steps[-1].at
    seconds = (end - begin) / 1000
    measured = steps[WARM_UP:]
    beats = [each for each in metrics if each.name == "replica" and begin <= each.measured_at <= end]
    return Ran(
        seconds=seconds * time_scale,
        trained_tokens_per_s=sum(step.values["tokens"] for step in measured) * stride / (seconds * time_scale),
        generated_tokens_per_s=_generated(beats) * stride / time_scale,
        kv_use=_mean_over_replicas(beats, lambda values: values["kv_used"] / values["kv_capacity"]),
        latency_s=statistics.fmean(b - a for a, b in spans if begin <= b <= end) / 1000 * time_scale,
        staleness_mean=_weighted(measured, "staleness/mean"),
        staleness_max=max(step.values["staleness/max"] for step in measured),
        trainer_idle=min(1.0, sum(step.values["time/wait"] for step in measured) / seconds),
        rollout_idle=_mean_over_replicas(beats, lambda values: float(values["running"] + values["waiting"] == 0)),
    )


def _generated(beats: Sequence[Metric]) -> float:
    """Tokens a second over all replicas, each by its own first and last word."""
    rate = 0.0
    for each in _by_replica(beats).values():
        seconds = (each[-1].measured_at - each[0].measured_at) / 1000
        if seconds:
            rate += (each[-1].values["tokens_generated"] - each[0].values["tokens_generated"]) / seconds
    return rate


def _mean_over_replicas(beats: Sequence[Metric], value: Any) -> float:
    """The mean over time of `value`, each beat standing for the time until the next; and over replicas."""
    means = []
    for each in _by_replica(beats).values():
        spans = [(b.measured_at - a.measured_at, value(a.values)) for a, b in pairwise(each) if a.values["kv_capacity"]]
        total = sum(length for length, _ in spans)
        if total:
            means.append(sum(length * found for length, found in spans) / total)
    return statistics.fmean(means)


def _by_replica(beats: Sequence[Metric]) -> Mapping[int, list[Metric]]:
    found: dict[int, list[Metric]] = defaultdict(list)
    for each in sorted(beats, key=lambda each: each.measured_at):
        found[each.step].append(each)
    return found


def _weighted(steps: Sequence[Batch], key: str) -> float:
    return sum(step.values[key] * step.trajectories for step in steps) / sum(step.trajectories for step in steps)
