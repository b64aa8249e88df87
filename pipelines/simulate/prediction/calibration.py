"""Calibration: the emulation of a run's own engine and trainer, from the metrics of a short run.

The engine's steps are those of the run (`engine_speed`), so they contain what the machine's other work costs. KV reads
are part of them. Lengths are a lognormal distribution with the mean and the longest responses of the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist, fmean, median, pstdev

from operators.rollout.emulation_config import EngineEmulation, LengthsConfig, RooflineConfig
from operators.trainer.emulation import TrainerEmulation
from pipelines.config import Config, ConfigError, load_config
from pipelines.inspect.metrics_file import REPLICA, read_metrics
from pipelines.inspect.run_files import CONFIG_FILE, METRICS_FILE
from pipelines.simulate.prediction.cluster import uncalibrated
from pipelines.simulate.prediction.emulated_config import emulated_config
from pipelines.simulate.prediction.engine_speed import decode_line, engine_intervals
from schemas.records import Metric

WARM_UP = 1
"""Optimizer steps that are left out: the first one compiles and allocates."""
FEW = 3
"""Intervals with engine steps that are enough to calibrate."""
_P99 = NormalDist().inv_cdf(0.99)


def calibrate(folder: Path) -> Config:
    """The configuration of the run in `folder`, with the emulation of what was measured.

    Raises ConfigError if it has too few steps of the trainer or the engines.
    """
    config = load_config(folder / CONFIG_FILE)
    file = folder / METRICS_FILE
    if not file.exists():
        raise ConfigError(f"{folder} has no {METRICS_FILE}: name the folder of a run")
    return calibrated(config, read_metrics(file), str(folder))


def calibrated(config: Config, metrics: Sequence[Metric], name: str) -> Config:
    """`config` with the emulation that `metrics` show. Raises ConfigError."""
    if reason := uncalibrated(config):
        raise ConfigError(f"{name}: {reason}")
    if environments := sorted({task.environment for task in config.prompts.mixture if task.environment}):
        raise ConfigError(f"{name}: turns and waits of environments ({', '.join(environments)}) are not predicted")
    steps = {each.step: each for each in metrics if each.name == "trainer" and "time/update" in each.values}
    ordered = [steps[number] for number in sorted(steps)][WARM_UP:]
    if len(ordered) < 2:
        raise ConfigError(f"{name} has {len(steps)} optimizer steps: at least {WARM_UP + 2} are needed to calibrate")
    if config.emulated:  # it says itself how long everything takes
        return config
    intervals = list(engine_intervals(metrics))
    if len(intervals) < FEW:
        raise ConfigError(_without_speed(len(intervals), len(steps), name))
    response = fmean(each.values["response_length/mean"] for each in ordered)
    longest = fmean(each.values["response_length/max"] for each in ordered)
    rows = fmean(each.values["batch/trajectories"] for each in ordered)
    tokens = fmean(each.values["batch/tokens"] for each in ordered)
    context = config.context
    prompt = min(context - 1, max(1, round(tokens / rows - response)))
    emulation = EngineEmulation(
        roofline=RooflineConfig(
            decode_ms=decode_line(intervals),
            decode_context=0,
            kv_ns=0.0,
            prefill_us=0.0,
            kv_move_us=0.0,
        ),
        lengths=lengths_of(response, longest, rows),
        pull_s=0.0,
        block=1,
    )
    stall = fmean(each.values.get("weight_sync/seconds", 0.0) for each in ordered)
    trainer = TrainerEmulation(_step_line(ordered), stall, 0.0)
    trainer = replace(trainer, deviation=_deviation(ordered, trainer))
    vllm = config.rollout.engine == "vllm"  # KV as its memory allows; other engines have slots × context
    return emulated_config(
        config,
        prompt,
        emulation,  # the lengths measured are those of all tasks
        trainer,
        context=context,
        slots=config.rollout.slots or _measured(metrics, "capacity"),
        kv_capacity=config.rollout.kv_capacity or (_measured(metrics, "kv_capacity") if vllm else None),
        speculation=False,  # what it does is in the times measured
    )


def _measured(metrics: Sequence[Metric], value: str) -> int | None:
    """The median of a value of the heartbeats; None if none has it."""
    found = [each.values[value] for each in metrics if each.name == REPLICA and each.values.get(value)]
    return round(median(found)) if found else None


def _without_speed(intervals: int, steps: int, name: str) -> str:
    """The error of a run that does not show its engine's speed, with what to do."""
    longer = 1 + math.ceil(FEW / max(intervals, 1))
    return (
        f"{name} has {intervals} intervals in which an engine stepped, between two metrics of its process, in "
        f"{steps} optimizer steps; {FEW} are needed to know its speed: run it for about "
        f"{longer * max(steps, 1)} optimizer steps (trainer.optimizer_steps)"
    )


def lengths_of(mean: float, longest: float, drawn: float) -> LengthsConfig:
    """The lognormal lengths with this mean whose longest of `drawn` responses is `longest`."""
    at = NormalDist().inv_cdf(1 - 1 / max(2.0, drawn + 1))
    ratio = math.log(max(longest / mean, 1.0))
    sigma = at - math.sqrt(max(0.0, at * at - 2 * ratio))
    p50 = max(1.0, mean * math.exp(-sigma * sigma / 2))
    return LengthsConfig(p50, max(p50, p50 * math.exp(_P99 * sigma)))


def _deviation(steps: Sequence[Metric], trainer: TrainerEmulation) -> float:
    """The deviation of the times of steps, each over the time that `trainer` gives its tokens."""
    times = [each.values["time/update"] / trainer.seconds(each.values["batch/tokens"]) for each in steps]
    return pstdev(times) / fmean(times)


def _step_line(steps: Sequence[Metric]) -> tuple[tuple[float, float], ...]:
    """Seconds of a step over its tokens, as a line; through the origin where batches are too alike for two numbers."""
    tokens = [each.values["batch/tokens"] for each in steps]
    seconds = [each.values["time/update"] for each in steps]
    mean_tokens, mean_s = fmean(tokens), fmean(seconds)
    variance = fmean((each - mean_tokens) ** 2 for each in tokens)
    slope = mean_s / mean_tokens
    if variance > (0.2 * mean_tokens) ** 2:
        found = fmean((a - mean_tokens) * (b - mean_s) for a, b in zip(tokens, seconds, strict=True)) / variance
        slope = min(slope, max(0.0, found))
    fixed = max(0.0, mean_s - slope * mean_tokens)  # rounding may make it negative
    return (0.0, fixed), (mean_tokens, mean_s)
