"""The charts of a run's report, and the metric series of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipelines.present.plots import (
    COLOURS,
    Axis,
    Level,
    Line,
    Points,
    bar_plot,
    heat_map,
    line_plot,
    smoothed,
    timeline,
)
from pipelines.present.report.series import (
    Batch,
    batches,
    components_of,
    evaluations,
    newest_by_step,
    staleness_histogram,
    tasks_of,
)
from pipelines.present.view.text import clock, count
from schemas.metric_labels import COMPONENT_MEAN
from schemas.records import Metric

RATE_WINDOW = 8
SMOOTHING = 9
"""Optimizer steps over which the bold lines are moving averages."""


class Chart(NamedTuple):
    """A plot with its title, and a sentence that explains it ("" if none is needed)."""

    title: str
    svg: str
    note: str = ""


def charts(metrics: Sequence[Metric], summary: Mapping[str, Any]) -> list[Chart]:
    """Return all charts, in the order of the report."""
    best = summary.get("heldout_warm_start_best")
    policy = [divergence(metrics)] if _has(metrics, "kl/mismatch") or _has(metrics, "entropy") else []
    return [
        reward(metrics),
        held_out(metrics, best),
        *tasks(metrics),
        *components(metrics),
        staleness(metrics),
        staleness(metrics, "staleness_at_finish", "Staleness at the end of generation"),
        response_length(metrics),
        trained_per_second(metrics),
        generated_per_second(metrics),
        replica_chart(metrics, "KV cache in use", "kv_used", "kv_capacity"),
        replica_chart(metrics, "Slots in use", "running", "capacity"),
        lag(metrics),
        *policy,
    ]


def reward(metrics: Sequence[Metric]) -> Chart:
    """Return the training reward over trained trajectories."""
    points = batch_values(batches(metrics), "reward/mean")
    lines = [
        Line("mean of a batch", points, 0, faint=True),
        Line(f"mean over {SMOOTHING} steps", smoothed(points, SMOOTHING), 0),
    ]
    return _lines("Mean reward", lines, _TRAJECTORIES, Axis("mean reward", _two))


def held_out(metrics: Sequence[Metric], best: float | None) -> Chart:
    """Return the held-out accuracy over weight versions."""
    results = evaluations(metrics)
    lines = [
        Line("greedy", [(each.version, each.greedy) for each in results if each.greedy is not None], 0, dots=True),
        Line("sampled", [(each.version, each.sampled) for each in results if each.sampled is not None], 1, dots=True),
    ]
    levels = [Level(f"best supervised checkpoint, greedy: {best:.2f}", best)] if best is not None else []
    note = "The dashed line is the best accuracy of supervised learning alone, in the warm start." if levels else ""
    return _lines("Accuracy on held-out questions", lines, _VERSIONS, _ACCURACY, levels, note)


def tasks(metrics: Sequence[Metric]) -> list[Chart]:
    """Return reward and held-out accuracy by task; no charts if there is only one task."""
    trained, found = tasks_of(metrics), evaluations(metrics)
    if not trained:
        return []
    rewards, accuracies = [], []
    for colour, (task, own) in enumerate(trained.items()):
        rewards.append(Line(task, smoothed(batch_values(own, "reward/mean"), SMOOTHING), colour))
        measured = [(each.version, each.by_task[task]) for each in found if task in each.by_task]
        accuracies.append(Line(task, measured, colour, dots=True))
    x = Axis("trajectories of the task", count, low=0)
    return [
        _lines("Mean reward by task", rewards, x, Axis("mean reward", _two)),
        _lines("Held-out accuracy by task, greedy", accuracies, _VERSIONS, _ACCURACY),
    ]


def components(metrics: Sequence[Metric]) -> list[Chart]:
    """Return the means of the reward components; no chart if there is only one."""
    lines = [
        Line(name, smoothed(batch_values(trained, COMPONENT_MEAN), SMOOTHING), colour)
        for colour, (name, trained) in enumerate(components_of(metrics).items())
    ]
    x = Axis("trajectories with the component", count, low=0)
    return [_lines("Reward by component, before weighting", lines, x, Axis("mean", _two))] if lines else []


def staleness(metrics: Sequence[Metric], when: str = "staleness", title: str = "Staleness at training") -> Chart:
    """Return the histogram of trajectories by staleness, at training or at the end of generation."""
    histogram = staleness_histogram(metrics, when)
    values = range(max(histogram) + 1) if histogram else range(0)
    bars = {str(value): float(histogram.get(value, 0)) for value in values}
    x, y = Axis("versions behind the newest", _whole), Axis("trajectories", count, low=0)
    return Chart(title, bar_plot(title, bars, x, y))


def response_length(metrics: Sequence[Metric]) -> Chart:
    """Return the response length over trained trajectories."""
    trained = batches(metrics)
    lines = [
        Line(label, batch_values(trained, key), colour)
        for colour, (label, key) in enumerate((("mean", "response_length/mean"), ("longest", "response_length/max")))
    ]
    return _lines("Response length", lines, _TRAJECTORIES, Axis("tokens", count, low=0))


def trained_per_second(metrics: Sequence[Metric]) -> Chart:
    """Return trajectories trained per second, over time."""
    start = _start(metrics)
    rates = _rates([((each.at - start) / 1000, each.cumulative) for each in batches(metrics)])
    lines = [Line(f"over {RATE_WINDOW} steps", rates, 0)]
    return _lines("Trajectories trained per second", lines, _TIME, Axis("per second", count, low=0))


def generated_per_second(metrics: Sequence[Metric]) -> Chart:
    """Return response tokens generated per second by each replica, over time."""
    start = _start(metrics)
    by_replica: dict[int, dict[float, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for metric in metrics:
        if metric.name == "replica" and "tokens_generated" in metric.values:
            point = ((metric.measured_at - start) / 1000, metric.values["tokens_generated"])
            by_replica[metric.step][metric.values.get("incarnation", 0.0)].append(point)
    rates = {
        replica: [rate for points in incarnations.values() for rate in _rates(points)]
        for replica, incarnations in by_replica.items()
    }
    return _by_replica("Tokens generated per second", rates, Axis("per second", count, low=0))


def replica_chart(metrics: Sequence[Metric], title: str, used: str, capacity: str) -> Chart:
    """Return the share `used` / `capacity` of each replica, over time."""
    start = _start(metrics)
    shares: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for metric in metrics:
        if metric.name == "replica" and used in metric.values and metric.values.get(capacity):
            at = (metric.measured_at - start) / 1000
            shares[metric.step].append((at, metric.values[used] / metric.values[capacity]))
    return _by_replica(title, shares, Axis("share", lambda value: f"{100 * value:.0f} %", low=0, high=1))


def _by_replica(title: str, series: Mapping[int, Points], y: Axis) -> Chart:
    """Return a line for each replica, or a heat map if there are more replicas than colours."""
    if len(series) > COLOURS:
        rows = {str(replica): points for replica, points in sorted(series.items())}
        return Chart(title, heat_map(title, rows, _TIME, y), "A row for each replica, by its index.")
    lines = [Line(f"replica {replica}", points, replica) for replica, points in sorted(series.items())]
    return _lines(title, lines, _TIME, y)


def lag(metrics: Sequence[Metric]) -> Chart:
    """Return the lag in records by topic, over time; topics that never lag are omitted."""
    start = _start(metrics)
    behind: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for metric in metrics:
        if metric.name == "lag":
            for short_name, records in metric.values.items():
                behind[short_name].append(((metric.measured_at - start) / 1000, records))
    late = {short_name: points for short_name, points in behind.items() if any(records for _, records in points)}
    lines = [Line(short_name, points, colour) for colour, (short_name, points) in enumerate(late.items())]
    return _lines("Lag by topic, in records", lines, _TIME, Axis("records", count, low=0))


def divergence(metrics: Sequence[Metric]) -> Chart:
    """Return the KL divergence from the generating policies to the trained one, and entropy, over optimizer steps."""
    trained = newest_by_step(metrics, "trainer")
    lines = [
        Line(label, [(float(each.step), each.values[key]) for each in trained if key in each.values], colour)
        for colour, (label, key) in enumerate((("KL to the generating policy", "kl/mismatch"), ("entropy", "entropy")))
    ]
    x, y = Axis("optimizer step", _whole), Axis("nats per token", lambda value: f"{value:.3g}", low=0)
    return _lines("Policy: divergence and entropy", lines, x, y)


def phases(spans: Mapping[str, float]) -> Chart:
    """Return the timeline of the run's phases."""
    named = [(name.replace("_", " "), seconds) for name, seconds in spans.items() if seconds > 0]
    title = "Phases"
    return Chart(title, timeline(title, named, clock))


def _lines(title: str, lines: Sequence[Line], x: Axis, y: Axis, levels: Sequence[Level] = (), note: str = "") -> Chart:
    return Chart(title, line_plot(title, lines, x, y, levels), note)


def batch_values(trained: Sequence[Batch], key: str) -> list[tuple[float, float]]:
    """Return the value `key` over the trained trajectories."""
    return [(each.cumulative, each.values[key]) for each in trained if key in each.values]


def _rates(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the rate per second over the last `RATE_WINDOW` points; `points` are (seconds, cumulative value)."""
    ordered = sorted(points)
    rates = []
    for index in range(1, len(ordered)):
        (before, low), (after, high) = ordered[max(0, index - RATE_WINDOW)], ordered[index]
        if after > before:
            rates.append((after, max(0.0, high - low) / (after - before)))
    return rates


def _start(metrics: Sequence[Metric]) -> int:
    return min((metric.measured_at for metric in metrics), default=0)


def _has(metrics: Sequence[Metric], key: str) -> bool:
    return any(key in metric.values for metric in metrics if metric.name == "trainer")


def _two(value: float) -> str:
    return f"{value:.2f}"


def _whole(value: float) -> str:
    return f"{value:.0f}"


_TIME = Axis("time since the start", clock, low=0)
_TRAJECTORIES = Axis("trajectories trained", count, low=0)
_VERSIONS, _ACCURACY = Axis("weight version", _whole, low=0), Axis("accuracy", _two, low=0, high=1)
