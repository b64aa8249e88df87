"""Whole emulated runs for benchmarks, each on its own Kafka, and the measurements of their logs."""

from __future__ import annotations

import math
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.ended_runs import rows_of
from benchmarks.moves import Moves, moves_of
from infra.kafka.broker import BrokerConfig, start_broker
from infra.kafka.properties import ClientProperties
from pipelines.config import load_config
from pipelines.inspect.metrics_file import read_metrics
from pipelines.present.report.series import Batch, batches
from pipelines.simulate.prediction.measurement import counter_gain
from schemas.records import Assignment, Metric, Trajectory
from schemas.topics import INBOX, TRAJECTORIES

WARM_UP = 2
"""Optimizer steps before the measured time: pipelines fill, and all replicas start at once."""
LIMIT_S = 5400.0


class RunFailed(RuntimeError):
    """A run did not reach its goal, or its audit failed."""


@dataclass(frozen=True, slots=True)
class RunMeasurement:
    """One run, measured from the end of step `WARM_UP` to the end of the last step; real tokens, emulated seconds."""

    seconds: float
    trained_tokens_per_s: float
    """Tokens of global batches, prompts included, per second: the throughput of the Laminar paper."""
    generated_tokens_per_s: float
    kv_use: float
    """Mean over replicas and time."""
    latency_s: float
    """Mean from a trajectory's first assignment to its finish."""
    staleness_mean: float
    staleness_max: float
    trainer_idle: float
    rollout_idle: float
    """Shares of time: the trainer without a batch, the replicas without a request."""
    moves: Moves = field(default_factory=Moves)
    """Of the whole run, in wall-clock seconds."""

    @property
    def bubbles(self) -> float:
        """The idle share of the accelerators' time, if trainer and rollouts have equally many."""
        return (self.trainer_idle + self.rollout_idle) / 2

    def to_json(self) -> dict[str, Any]:
        """All fields and `bubbles`, by name."""
        return {**asdict(self), "bubbles": self.bubbles}


@contextmanager
def emulated_run(
    example: Path,
    name: str,
    folder: Path,
    changes: Sequence[str],
    during: Callable[[Path, Callable[[], bool]], None] = lambda folder, is_running: None,
) -> Iterator[tuple[Path, ClientProperties]]:
    """Run `example` with `changes` ("section.key=value") as `name` in `folder`; yield the run's folder and its Kafka.

    Kafka stops when the context ends. Files of an earlier run of this name are deleted first. `during` is called once
    the run's process has started, with the run's folder and a function that returns whether the process still runs.
    Raises RunFailed with the end of the run's output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / name, folder / f"kafka-{name}"):
        shutil.rmtree(old, ignore_errors=True)
    with start_broker(BrokerConfig(folder / f"kafka-{name}")) as broker, (folder / f"{name}.log").open("w") as output:
        everything = [*changes, f"run.name={name}", f"run.folder={folder}"]
        everything.append(f"kafka.bootstrap_servers={broker.bootstrap_servers}")
        sets = [argument for change in everything for argument in ("--set", change)]
        command = [sys.executable, "-W", "ignore", "-c", "from pipelines.cli.main import main; main()", "run"]
        with subprocess.Popen([*command, str(example), *sets], stdout=output, stderr=subprocess.STDOUT) as process:
            try:
                during(folder / name, lambda: process.poll() is None)
                code = process.wait(LIMIT_S)
            finally:
                process.terminate()
        if code:
            raise RunFailed(f"run {name} exited with {code}: {Path(output.name).read_text()[-2000:]}")
        yield folder / name, ClientProperties.at(broker.bootstrap_servers)


def run_emulated(example: Path, name: str, folder: Path, changes: Sequence[str]) -> RunMeasurement:
    """Run `emulated_run` and measure it. Raises RunFailed."""
    with emulated_run(example, name, folder, changes) as (run, client):
        config = load_config(run / "config.toml")
        metrics = read_metrics(run / "metrics.jsonl")
        spans, moves = finished_spans(client, name), moves_of(client, name)
    return replace(measure(metrics, spans, config.run.time_scale, config.rollout.emulation.stride), moves=moves)


def finished_spans(client: ClientProperties, run: str) -> list[tuple[int, int]]:
    """Times of each finished trajectory's first assignment and finish, in Unix milliseconds."""
    assigned: dict[str, int] = {}
    for each in rows_of(client, INBOX.name(run), Assignment):
        assigned[each.trajectory_id] = min(each.assigned_at, assigned.get(each.trajectory_id, each.assigned_at))
    finished = {each.trajectory_id: each.finished_at for each in rows_of(client, TRAJECTORIES.name(run), Trajectory)}
    return [(assigned[name], at) for name, at in finished.items()]


def measure(
    metrics: Sequence[Metric], spans: Sequence[tuple[int, int]], time_scale: float, stride: int
) -> RunMeasurement:
    """Measure a run by its metrics and its trajectories' `spans`, without which its latency is not a number.

    Raises RunFailed if it has too few steps.
    """
    steps = batches(metrics)
    if len(steps) < WARM_UP + 2:
        raise RunFailed(f"{len(steps)} optimizer steps are too few to measure: at least {WARM_UP + 2} are needed")
    # The emulated trainer's name, else the real one's.
    tokens = "tokens" if "tokens" in steps[-1].values else "batch/tokens"
    begin, end = steps[WARM_UP - 1].at, steps[-1].at
    seconds = (end - begin) / 1000
    measured = steps[WARM_UP:]
    within = [each for each in metrics if begin <= each.measured_at <= end]
    heartbeats = [each for each in within if each.name == "replica"]
    return RunMeasurement(
        seconds=seconds * time_scale,
        trained_tokens_per_s=sum(step.values[tokens] for step in measured) * stride / (seconds * time_scale),
        generated_tokens_per_s=_generated(heartbeats) * stride / time_scale,
        kv_use=_mean_over_replicas(heartbeats, lambda values: values["kv_used"] / values["kv_capacity"]),
        latency_s=statistics.fmean([b - a for a, b in spans if begin <= b <= end] or [math.nan]) / 1000 * time_scale,
        staleness_mean=_weighted(measured, "staleness/mean"),
        staleness_max=max(step.values["staleness/max"] for step in measured),
        trainer_idle=min(1.0, sum(step.values["time/wait"] for step in measured) / seconds),
        rollout_idle=_rollout_idle(within),
    )


def _generated(heartbeats: Sequence[Metric]) -> float:
    """Tokens/s of all replicas together, each between its first and last heartbeat."""
    rate = 0.0
    for each in _by_number(heartbeats, "replica").values():
        seconds = (each[-1].measured_at - each[0].measured_at) / 1000
        if seconds:
            rate += (each[-1].values["tokens_generated"] - each[0].values["tokens_generated"]) / seconds
    return rate


def _rollout_idle(metrics: Sequence[Metric]) -> float:
    """The share of time in which replicas had no request, by what their processes have counted."""
    hosted = len(_by_number(metrics, "replica")) / max(1, len(processes := _by_number(metrics, "rollout")))
    busy = [
        counter_gain([metric.values["rollout/busy_seconds"] for metric in each])
        / max((each[-1].measured_at - each[0].measured_at) / 1000 * hosted, 1e-9)
        for each in processes.values()
        if len(each) > 1
    ]
    return 1.0 - statistics.fmean(busy) if busy else math.nan


def _mean_over_replicas(heartbeats: Sequence[Metric], value: Any) -> float:
    """The mean of `value` over time and replicas; each heartbeat holds until the next one. Not a number without two."""
    means = []
    for each in _by_number(heartbeats, "replica").values():
        spans = [(b.measured_at - a.measured_at, value(a.values)) for a, b in pairwise(each) if a.values["kv_capacity"]]
        total = sum(length for length, _ in spans)
        if total:
            means.append(sum(length * found for length, found in spans) / total)
    return statistics.fmean(means or [math.nan])


def _by_number(metrics: Sequence[Metric], name: str) -> Mapping[int, list[Metric]]:
    """The metrics of `name` by replica or process, in the order of their times."""
    found: dict[int, list[Metric]] = defaultdict(list)
    for each in sorted(metrics, key=lambda each: each.measured_at):
        if each.name == name:
            found[each.step].append(each)
    return found


def _weighted(steps: Sequence[Batch], key: str) -> float:
    return sum(step.values[key] * step.trajectories for step in steps) / sum(step.trajectories for step in steps)
