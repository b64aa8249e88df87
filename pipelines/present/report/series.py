"""The metric series of a metrics file, with the newest record of each step, for the charts and the summary."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pipelines.inspect.run_state.buffers import merge_shards
from pipelines.inspect.run_state.busy import STOPPED_MS, busy_shares_of
from pipelines.inspect.run_state.evaluation import Evaluation, merge_evaluation
from pipelines.inspect.run_state.pace import WINDOW_MS, RunRates, WholeRun
from pipelines.inspect.run_state.state import tokens_of_batch
from schemas.metric_labels import (
    COMPONENT,
    COMPONENT_MEAN,
    COMPONENT_TRAJECTORIES,
    LATER_PARTS,
    SHARD,
    TASK,
    by_label,
)
from schemas.records import Metric


def newest_by_step(metrics: Iterable[Metric], name: str) -> list[Metric]:
    """Return the records of series `name` in ascending step, the newest of each: a restarted role repeats steps.

    The records of several shards for a step are merged into one.
    """
    by_step: dict[int, dict[tuple[float, float | None], Metric]] = defaultdict(dict)
    for metric in metrics:
        if metric.name == name:
            by_shard = by_step[metric.step]
            shard = metric.values.get(SHARD, 0.0), metric.values.get(LATER_PARTS)
            if shard not in by_shard or metric.measured_at >= by_shard[shard].measured_at:
                by_shard[shard] = metric
    shards = [list(by_step[step].values()) for step in sorted(by_step)]
    return [
        replace(each[-1], values=merge_shards([one.values for one in each])) if len(each) > 1 else each[0]
        for each in shards
    ]


def evaluations(metrics: Iterable[Metric]) -> list[Evaluation]:
    """Return the held-out accuracies in ascending version."""
    by_version: dict[int, Evaluation] = {}
    for metric in sorted((each for each in metrics if each.name == "evaluation"), key=lambda each: each.measured_at):
        by_version[metric.step] = merge_evaluation(by_version.get(metric.step), metric)
    return [by_version[version] for version in sorted(by_version)]


def staleness_histogram(metrics: Iterable[Metric], when: str = "staleness") -> dict[int, int]:
    """Return the number of trained trajectories by staleness in versions: when batched, or `staleness_at_finish`.

    A last batch that was packed and not trained does not count, as in the lineage of versions.
    """
    counts: dict[int, int] = defaultdict(int)
    for metric in _trained_batches(list(metrics)):
        for key, value in metric.values.items():
            versions = key.removeprefix(f"{when}/")
            if versions != key and versions.isdigit():
                counts[int(versions)] += round(value)
    return dict(sorted(counts.items()))


def _trained_batches(metrics: Sequence[Metric]) -> list[Metric]:
    """Return the batches without those that wait for the trainer, or will never be trained; all without its metrics."""
    end = max((metric.step for metric in metrics if metric.name == "trainer"), default=None)
    return [metric for metric in newest_by_step(metrics, "experience") if end is None or metric.step < end]


def over_age(metrics: Iterable[Metric]) -> int | None:
    """Return the number of batched trajectories above `experience.max_staleness`; None if the buffer reports none."""
    values = [metric.values for metric in newest_by_step(metrics, "experience")]
    reported = [each["over_age"] for each in values if "over_age" in each]
    return round(sum(reported)) if reported else None


def dropped_by_length(metrics: Iterable[Metric]) -> list[float]:
    """Return the share of trajectories that the buffer dropped by decile of response length, shortest first, from its
    newest record; empty if it dropped none."""
    records = newest_by_step(metrics, "experience")
    newest = records[-1].values if records else {}
    shares = {key: value for key, value in newest.items() if key.startswith("dropped_share/")}
    return [shares[f"dropped_share/{decile}"] for decile in range(1, len(shares) + 1)]


BY_TASK = ("trajectories", "reward/mean", "response_length/mean", "accuracy/mean")
"""The values that the buffer reports for each task of a batch."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One optimizer step: the trajectories that it trained, and `cumulative`, all that were trained after it."""

    step: int
    at: int
    trajectories: float
    cumulative: float
    values: Mapping[str, float]


def batches(metrics: Iterable[Metric]) -> list[Batch]:
    """Return the optimizer steps in order, without those that do not report the number of trained trajectories."""
    found: list[Batch] = []
    for metric in newest_by_step(metrics, "trainer"):
        if "trajectories" in metric.values:
            total = metric.values["trajectories"]
            new = max(0.0, total - (found[-1].cumulative if found else 0.0))
            found.append(Batch(metric.step, metric.measured_at, new, total, metric.values))
    return found


def tasks_of(metrics: Iterable[Metric]) -> dict[str, list[Batch]]:
    """Return the batches of each task by its name, the most trained first; empty if there is only one task.

    `values` are the values reported for the task, without its name; `trajectories` and `cumulative` count the task's.
    """
    found = task_batches(metrics)
    return found if len(found) > 1 else {}


def task_batches(metrics: Iterable[Metric]) -> dict[str, list[Batch]]:
    """As `tasks_of`, also of a single task."""
    return _by_label(metrics, TASK, BY_TASK, "trajectories")


def components_of(metrics: Iterable[Metric]) -> dict[str, list[Batch]]:
    """Return the batches of each reward component by its name; empty if there is only one. See `tasks_of`."""
    found = _by_label(metrics, COMPONENT, (COMPONENT_MEAN,), COMPONENT_TRAJECTORIES)
    return found if len(found) > 1 else {}


def _by_label(metrics: Iterable[Metric], label: str, measures: Sequence[str], counted: str) -> dict[str, list[Batch]]:
    found = defaultdict[str, list[Batch]](list)
    for metric in _trained_batches(list(metrics)):
        for name, values in by_label(metric.values, label).items():
            own = {measure: value for measure, value in values.items() if measure in measures}
            before = found[name][-1].cumulative if found[name] else 0.0
            new = values.get(counted, 0.0)
            found[name].append(Batch(metric.step, metric.measured_at, new, before + new, own))
    return dict(sorted(found.items(), key=lambda item: -item[1][-1].cumulative))


def weighted_mean(of: Sequence[Batch], key: str) -> float | None:
    """Return the mean over trajectories of a value that each batch reports as its mean; None if no batch has it."""
    having = [batch for batch in of if key in batch.values and batch.trajectories]
    total = sum(batch.trajectories for batch in having)
    return sum(batch.values[key] * batch.trajectories for batch in having) / total if total else None


def mean_between(of: Sequence[Batch], key: str, first: float, last: float) -> float | None:
    """Return the mean of `key` over the trained trajectories from `first` to `last`; a batch counts by its overlap."""
    total = weight = 0.0
    for batch in of:
        share = min(last, batch.cumulative) - max(first, batch.cumulative - batch.trajectories)
        if share > 0 and key in batch.values:
            total, weight = total + share * batch.values[key], weight + share
    return total / weight if weight else None


def tokens_generated(metrics: Iterable[Metric]) -> int | None:
    """Return the response tokens of all replica incarnations, by their last heartbeats.

    A log has no samples of heartbeats: then those of all starts of rollout processes. None without either.
    """
    last: dict[tuple[int, float], float] = {}
    metrics, starts = list(metrics), Counter[int]()
    for metric in metrics:
        if metric.name == "replica" and "tokens_generated" in metric.values:
            incarnation = (metric.step, metric.values.get("incarnation", 0.0))
            last[incarnation] = max(last.get(incarnation, 0.0), metric.values["tokens_generated"])
    for metric in metrics if not last else ():
        if metric.name == "rollout" and (tokens := metric.values.get("rollout/tokens")) is not None:
            starts[metric.step] += tokens < last.get((metric.step, starts[metric.step]), 0.0)  # a start counts from 0
            last[metric.step, starts[metric.step]] = tokens
    return int(sum(last.values())) if last else None


def tokens_per_s(metrics: Sequence[Metric]) -> float | None:
    """Return the response tokens per second from the first optimizer step to the last, without the time it was stopped.

    None for a shorter time than rates are computed over.
    """
    if (span := _training_span(metrics)) is None:
        return None
    begin, end, seconds = span
    before = tokens_generated([metric for metric in metrics if metric.measured_at <= begin]) or 0
    until = tokens_generated([metric for metric in metrics if metric.measured_at <= end]) or 0
    return round((until - before) / seconds, 1) if until else None


def whole_run(metrics: Sequence[Metric]) -> WholeRun:
    """Return how busy the roles of a run were, and how fast it was, from its first optimizer step to the last."""
    trained, span, generated = batches(metrics), _training_span(metrics), tokens_per_s(metrics)
    if span is None or not trained:
        return WholeRun(busy_shares_of(metrics), RunRates(None, None, None, generated))
    _, _, seconds = span
    steps, trajectories = trained[-1].step - trained[0].step, trained[-1].cumulative - trained[0].cumulative
    tokens = sum(tokens_of_batch(each.values) for each in trained[1:])
    rates = RunRates(steps / seconds, trajectories / seconds, tokens / seconds, generated)
    return WholeRun(busy_shares_of(metrics), rates)


def _training_span(metrics: Iterable[Metric]) -> tuple[int, int, float] | None:
    """Return when the first and the last optimizer step ended, in Unix milliseconds, and the seconds between without
    those in which the run was stopped; None if that is too short for a rate."""
    metrics = list(metrics)
    steps = [metric.measured_at for metric in metrics if metric.name == "trainer"]
    if not steps:
        return None
    begin, end = min(steps), max(steps)
    times = sorted(metric.measured_at for metric in metrics if begin <= metric.measured_at <= end)
    gaps = (later - earlier for earlier, later in pairwise(times))
    running_ms = end - begin - sum(gap for gap in gaps if gap > STOPPED_MS)
    return (begin, end, running_ms / 1000) if running_ms >= WINDOW_MS else None


def weight_versions(metrics: Iterable[Metric]) -> int | None:
    """Return the number of published weight versions; None without manifests."""
    return len({(metric.values.get("epoch"), metric.step) for metric in metrics if metric.name == "version"}) or None
