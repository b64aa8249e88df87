"""Whole emulated runs for benchmarks, on a Kafka of their own, and what their logs say of them."""

from __future__ import annotations

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
from schemas.records import Assignment, Metric, Trajectory
from schemas.topics import INBOX, TRAJECTORIES

WARM_UP = 2
"""Optimizer steps before the measured time: pipelines that fill, replicas that begin all at once."""
LIMIT_S = 5400.0


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
    """Mean from a trajectory's first assignment to its finish."""
    staleness_mean: float
    staleness_max: float
    trainer_idle: float
    rollout_idle: float
    """Shares of time: of the trainer without a batch, of replicas without a request."""
    moves: Moves = field(default_factory=Moves)
    """Over the whole run, in seconds that are not emulated."""

    @property
    def bubbles(self) -> float:
        """The share of the accelerators' time that is idle, where trainer and rollouts have as many each."""
        return (self.trainer_idle + self.rollout_idle) / 2

    def to_json(self) -> dict[str, Any]:
        """Everything, by name."""
        return {**asdict(self), "bubbles": self.bubbles}


@contextmanager
def emulated_run(
    example: Path,
    name: str,
    folder: Path,
    changes: Sequence[str],
    meddle: Callable[[Path, Callable[[], bool]], None] = lambda folder, goes_on: None,
) -> Iterator[tuple[Path, ClientProperties]]:
    """The folder of an ended run and the Kafka of its topics, which goes when the context ends.

    It is `example` with `changes` ("section.key=value"), run as `name` in `folder`; what one that was stopped left
    there goes. `meddle` is called with the run's folder once its process has been started, and with what tells whether
    it still goes on. Raises RunFailed with what it said.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in (folder / name, folder / f"kafka-{name}"):
        shutil.rmtree(left, ignore_errors=True)
    with start_broker(BrokerConfig(folder / f"kafka-{name}")) as broker, (folder / f"{name}.log").open("w") as said:
        everything = [*changes, f"run.name={name}", f"run.folder={folder}"]
        everything.append(f"kafka.bootstrap_servers={broker.bootstrap_servers}")
        sets = [word for change in everything for word in ("--set", change)]
        command = [sys.executable, "-W", "ignore", "-c", "from pipelines.cli.main import main; main()", "run"]
        with subprocess.Popen([*command, str(example), *sets], stdout=said, stderr=subprocess.STDOUT) as process:
            try:
                meddle(folder / name, lambda: process.poll() is None)
                code = process.wait(LIMIT_S)
            finally:
                process.terminate()
        if code:
            raise RunFailed(f"run {name} ended with {code}: {Path(said.name).read_text()[-2000:]}")
        yield folder / name, ClientProperties.at(broker.bootstrap_servers)


def run_emulated(example: Path, name: str, folder: Path, changes: Sequence[str]) -> Ran:
    """What an `emulated_run` measures. Raises RunFailed."""
    with emulated_run(example, name, folder, changes) as (run, client):
        config = load_config(run / "config.toml")
        metrics = read_metrics(run / "metrics.jsonl")
        spans, moves = finished_spans(client, name), moves_of(client, name)
    return replace(measure(metrics, spans, config.run.time_scale, config.rollout.emulation.stride), moves=moves)


def finished_spans(client: ClientProperties, run: str) -> list[tuple[int, int]]:
    """When each trajectory was first assigned and when it was finished, in Unix milliseconds."""
    assigned: dict[str, int] = {}
    for each in rows_of(client, INBOX.name(run), Assignment):
        assigned[each.trajectory_id] = min(each.assigned_at, assigned.get(each.trajectory_id, each.assigned_at))
    finished = {each.trajectory_id: each.finished_at for each in rows_of(client, TRAJECTORIES.name(run), Trajectory)}
    return [(assigned[name], at) for name, at in finished.items()]


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
