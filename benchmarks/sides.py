"""A side of benchmarks/end_to_end.py, and the first: a whole run of Laminar."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.ended_runs import read_ended
from benchmarks.measures import SETTLED_AFTER, EngineUse, Step, outside, seconds_a_batch, seconds_to, skipped_share
from benchmarks.processes import CpuWatch
from pipelines.config import Config, save_config
from pipelines.inspect.metrics_file import read_metrics
from pipelines.present.report.machine import package_versions
from pipelines.present.report.series import Batch, batches
from pipelines.run.warm_start import PROGRESS_FILE, make_warm_start
from schemas.records import Assignment, Metric
from schemas.topics import INBOX

LIMIT_S = 1800.0
MODEL_CPU, PROCESS_CPU = "cpu/model_seconds", "cpu/process_seconds"
"""Metrics of rollout and trainer: CPU time in model code, and of the process, since its start."""


@dataclass(frozen=True)
class Work:
    """One recipe and seed: the folder of its files, and its configuration."""

    folder: Path
    name: str
    config: Config

    def training(self, model: Path) -> Config:
        """The configuration of every side: it trains `model` without evaluation, so no question is held out."""
        config = self.config
        return replace(
            config,
            model=replace(config.model, path=str(model)),
            warm_start=None,
            prompts=replace(config.prompts, heldout=0),
        )


@dataclass(frozen=True)
class Side:
    """The result of one side. Shares and CPU seconds per global batch are by process or part, after start-up."""

    steps: Sequence[Step]
    threads: str
    versions: dict[str, str]
    start_up_seconds: float
    cpu_seconds_per_batch: dict[str, float]
    outside_model: dict[str, float]
    skipped_share: float | None = None
    """The share of trajectories that are not trained because their advantage is 0; None if it was not measured."""
    engine: Mapping[str, float] = field(default_factory=dict)
    """See EngineUse.figures."""

    def seconds_a_batch(self, batch: int) -> tuple[float, float] | None:
        """See measures.seconds_a_batch."""
        return seconds_a_batch(self.steps, batch)

    def seconds_to(self, reward: float, window: int) -> float | None:
        """See measures.seconds_to."""
        return seconds_to(self.steps, reward, window)


def warm_start(work: Work) -> Path:
    """The model folder that both sides start from; made, or found in the cache of warm starts."""
    config = replace(work.config, run=replace(work.config.run, name=f"{work.name}-warm"))
    config.run_folder.mkdir(parents=True, exist_ok=True)
    make_warm_start(config)
    return Path(json.loads((config.run_folder / PROGRESS_FILE).read_text("utf-8"))["folder"])


def run_laminar(work: Work, model: Path) -> Side:
    """Run all pipelines. Raises RuntimeError if the run or its audit fails."""
    config = replace(work.training(model), run=replace(work.config.run, name=work.name))
    folder = config.run_folder
    shutil.rmtree(folder, ignore_errors=True)
    file = work.folder / f"{work.name}.toml"
    save_config(config, file)
    laminar = Path(sys.executable).with_name("laminar")
    with (work.folder / f"{work.name}.log").open("w") as log:
        started = time.time()
        run = subprocess.Popen([laminar, "run", file, "--json"], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            with CpuWatch(run.pid, folder) as cpu:
                run.wait(LIMIT_S)
        finally:
            run.terminate()
            run.wait()
    if run.returncode:
        raise RuntimeError(f"laminar run exited with {run.returncode}: see {log.name}")
    metrics = read_metrics(folder / "metrics.jsonl")
    trained = batches(metrics)
    dispatched = first_dispatch(folder, config.run.name)
    settled = [batch for batch in trained if batch.step >= SETTLED_AFTER]
    threads = {"rollout": config.rollout.processes * config.rollout.threads, "trainer": config.trainer.threads}
    return Side(
        steps=[Step(b.step, b.at / 1000 - dispatched, b.values["reward/mean"], b.cumulative) for b in trained],
        threads=" + ".join(f"{name} {count}" for name, count in threads.items()),
        versions={name: package_versions()[name] for name in ("apache-beam", "torch", "transformers")},
        start_up_seconds=dispatched - started,
        cpu_seconds_per_batch=_cpu_a_batch(cpu, settled, config.experience.global_batch) if settled else {},
        outside_model=_outside_model(metrics, settled) if settled else {},
        skipped_share=skipped_share(b.values for b in trained),
        engine=_engine_use(metrics, settled).figures() if settled else {},
    )


def first_dispatch(folder: Path, run: str) -> float:
    """The time of the first assignment (Unix seconds)."""
    return min(assignment.assigned_at for assignment in read_ended(folder, run, INBOX, Assignment)) / 1000


def _cpu_a_batch(cpu: CpuWatch, settled: Sequence[Batch], batch: int) -> dict[str, float]:
    """CPU seconds per global batch, by process, between the first and the last step after start-up."""
    found = cpu.between(settled[0].at / 1000, settled[-1].at / 1000)
    if found is None:
        return {}
    first, last, seconds = found
    trained = [b.cumulative for b in settled if first <= b.at / 1000 <= last]
    if len(trained) < 2:
        return {}
    return {role: used * batch / (trained[-1] - trained[0]) for role, used in seconds.items()}


def _engine_use(metrics: Sequence[Metric], settled: Sequence[Batch]) -> EngineUse:
    """What the engines did during the steps after start-up."""
    names = ("rollout/tokens", "rollout/steps", MODEL_CPU)
    rollouts = [reports for process, reports in _reports(metrics, settled).items() if process != "trainer"]
    return EngineUse(*(sum(last[name] - first[name] for first, *_, last in rollouts) for name in names))


def _outside_model(metrics: Sequence[Metric], settled: Sequence[Batch]) -> dict[str, float]:
    """The share of CPU time outside model code during the steps after start-up, of each rollout and the trainer."""
    shares = {}
    for process, (first, *_, last) in _reports(metrics, settled).items():
        share = outside(last[MODEL_CPU] - first[MODEL_CPU], last[PROCESS_CPU] - first[PROCESS_CPU])
        if share is not None:
            shares[process] = share
    return shares


def _reports(metrics: Sequence[Metric], settled: Sequence[Batch]) -> dict[str, list[Mapping[str, float]]]:
    """The metrics with model time during the steps after start-up, by process, of each that has at least two.

    Their counters rise from the start of a process, so only those of one process can be subtracted.
    """
    found: dict[str, list[Mapping[str, float]]] = {}
    for metric in metrics:
        if MODEL_CPU in metric.values and settled[0].at <= metric.measured_at <= settled[-1].at:
            process = f"rollout-{metric.step}" if metric.name == "rollout" else metric.name
            found.setdefault(process, []).append(metric.values)
    return {process: reports for process, reports in found.items() if len(reports) > 1}
