"""What the plots and the summary have in common: the series of a metrics file, the newest account of each step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pipelines.inspect.run_state.buffers import SHARD, merge_shards
from pipelines.inspect.run_state.state import Evaluation, merge_evaluation
from schemas.records import Metric


def newest_by_step(metrics: Iterable[Metric], name: str) -> list[Metric]:
    """The records of series `name` by rising step, one a step: a restarted role measures the same steps again.

    What several shards tell of a step counts as one.
    """
    by_step: dict[int, dict[float, Metric]] = defaultdict(dict)
    for metric in metrics:
        if metric.name == name:
            told, shard = by_step[metric.step], metric.values.get(SHARD, 0.0)
            if shard not in told or metric.measured_at >= told[shard].measured_at:
                told[shard] = metric
    return [_as_one(list(by_step[step].values())) for step in sorted(by_step)]


def _as_one(told: Sequence[Metric]) -> Metric:
    return replace(told[-1], values=merge_shards([each.values for each in told])) if len(told) > 1 else told[0]


def evaluations(metrics: Iterable[Metric]) -> list[Evaluation]:
    """Held-out accuracy by rising version."""
    by_version: dict[int, Evaluation] = {}
    for metric in sorted((each for each in metrics if each.name == "evaluation"), key=lambda each: each.measured_at):
        by_version[metric.step] = merge_evaluation(by_version.get(metric.step), metric)
    return [by_version[version] for version in sorted(by_version)]


def staleness_histogram(metrics: Iterable[Metric], when: str = "staleness") -> dict[int, int]:
    """Trained trajectories by staleness at consumption, in versions; `when` "staleness_at_finish": as they finished."""
    counts: dict[int, int] = defaultdict(int)
    for metric in newest_by_step(metrics, "experience"):
        for key, value in metric.values.items():
            age = key.removeprefix(f"{when}/")
            if age != key and age.isdigit():
                counts[int(age)] += round(value)
    return dict(sorted(counts.items()))


def over_age(metrics: Iterable[Metric]) -> int | None:
    """Trajectories in batches that were older than `experience.max_staleness`; None where the buffer told of none."""
    told = [
        metric.values["over_age"] for metric in newest_by_step(metrics, "experience") if "over_age" in metric.values
    ]
    return round(sum(told)) if told else None


def dropped_by_length(metrics: Iterable[Metric]) -> list[float]:
    """The share that the buffer dropped of each tenth of the trajectories, from the shortest answers to the longest, by
    its last word; empty where it dropped nothing."""
    told = newest_by_step(metrics, "experience")
    shares = {key: value for key, value in told[-1].values.items() if key.startswith("dropped_share/")} if told else {}
    return [shares[f"dropped_share/{decile}"] for decile in range(1, len(shares) + 1)]


BY_TASK = ("trajectories", "reward/mean", "response_length/mean", "accuracy/mean")
"""What the buffer tells of each task with a batch, as "measure/task"."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one optimizer step trained: how many trajectories, and how many were trained after it in all."""

    step: int
    at: int
    trajectories: float
    cumulative: float
    values: Mapping[str, float]


def batches(metrics: Iterable[Metric]) -> list[Batch]:
    """The optimizer steps, in order; those that do not say how many trajectories were trained by then are left out."""
    found: list[Batch] = []
    for metric in newest_by_step(metrics, "trainer"):
        if "trajectories" in metric.values:
            total = metric.values["trajectories"]
            new = max(0.0, total - (found[-1].cumulative if found else 0.0))
            found.append(Batch(metric.step, metric.measured_at, new, total, metric.values))
    return found


def tasks_of(metrics: Iterable[Metric]) -> dict[str, list[Batch]]:
    """What each task had in each batch, by the task's name, the most trained first; nothing where there is one alone.

    `values` are those that batches tell by task, without its name; `at`, `cumulative` and the like are the task's own.
    """
    found: dict[str, list[Batch]] = defaultdict(list)
    for metric in newest_by_step(metrics, "experience"):
        values: dict[str, dict[str, float]] = defaultdict(dict)
        for key, value in metric.values.items():
            for measure in BY_TASK:
                if key.startswith(f"{measure}/"):
                    values[key.removeprefix(f"{measure}/")][measure] = value
        for task, own in values.items():
            so_far = found[task][-1].cumulative if found[task] else 0.0
            new = own.get("trajectories", 0.0)
            found[task].append(Batch(metric.step, metric.measured_at, new, so_far + new, own))
    return dict(sorted(found.items(), key=lambda item: -item[1][-1].cumulative)) if len(found) > 1 else {}


def weighted_mean(of: Sequence[Batch], key: str) -> float | None:
    """The mean over trajectories of a value that each batch gives as its own mean; None where no batch has it."""
    having = [batch for batch in of if key in batch.values and batch.trajectories]
    total = sum(batch.trajectories for batch in having)
    return sum(batch.values[key] * batch.trajectories for batch in having) / total if total else None


def mean_between(of: Sequence[Batch], key: str, first: float, last: float) -> float | None:
    """The mean of `key` over the trained trajectories number `first` to `last`; of a straddling batch, that part."""
    total = weight = 0.0
    for batch in of:
        share = min(last, batch.cumulative) - max(first, batch.cumulative - batch.trajectories)
        if share > 0 and key in batch.values:
            total, weight = total + share * batch.values[key], weight + share
    return total / weight if weight else None


def tokens_generated(metrics: Iterable[Metric]) -> int | None:
    """Response tokens by the replicas' last word of each of their starts; None where no heartbeat was kept."""
    last: dict[tuple[int, float], float] = {}
    for metric in metrics:
        if metric.name == "replica" and "tokens_generated" in metric.values:
            start = (metric.step, metric.values.get("incarnation", 0.0))
            last[start] = max(last.get(start, 0.0), metric.values["tokens_generated"])
    return int(sum(last.values())) if last else None


def weight_versions(metrics: Iterable[Metric]) -> int | None:
    """How many weight versions were published; None where no manifest was seen."""
    return len({(metric.values.get("epoch"), metric.step) for metric in metrics if metric.name == "version"}) or None
