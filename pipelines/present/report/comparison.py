"""The comparison report: the metrics of several runs side by side, and their curves in shared plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from pipelines.present.plots import Axis, Line, Points, line_plot, smoothed
from pipelines.present.report.charts import SMOOTHING, Chart, batch_values
from pipelines.present.report.html import LABELS, shown
from pipelines.present.report.page_style import head
from pipelines.present.report.series import Batch, batches, evaluations
from pipelines.present.view.text import clock, count
from schemas.records import Metric


class ComparedRun(NamedTuple):
    """A run to compare: its name, summary and metrics."""

    run: str
    summary: Mapping[str, Any]
    metrics: Sequence[Metric]


def comparison(runs: Sequence[ComparedRun]) -> str:
    """Return the self-contained HTML page. All text from the runs is escaped."""
    title = escape(" · ".join(each.run for each in runs))
    plots = "".join(f'<div class="card"><h3>{escape(each.title)}</h3>{each.svg}</div>' for each in _charts(runs))
    return "\n".join(
        [
            head(title),
            f"<h1>{len(runs)} runs</h1><h2>Plots</h2>",
            f'<div class="plots">{plots}</div><h2>Metrics</h2><div class="card">{_metric_table(runs)}</div>',
            "</main></body></html>\n",
        ]
    )


def metric_rows(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """Return a row for each summary metric that any run has, with a column for each run.

    One that is 0 in all runs has no row, except those of the audit, of held-out questions and the share of errors.
    Rows of each task and of each reward component follow.
    """
    rows = _rows(runs, "", LABELS, [each.summary for each in runs])
    for section, labels, prefix in (("tasks", OF_TASK, "task "), ("components", OF_COMPONENT, "component ")):
        found = [each.summary.get(section) or {} for each in runs]
        for name in dict.fromkeys(name for each in found for name in each):
            rows += _rows(runs, f"{prefix}{name}: ", labels, [each.get(name) or {} for each in found])
    return rows


SHOWN_AS_0 = ("error_share", "lost", "trained_twice")
OF_TASK = {
    key: LABELS[key]
    for key in ("reward_first", "reward_last", "heldout_before", "heldout_after", "trajectories_trained")
}
OF_COMPONENT = {"mean_first": "mean, first tenth", "mean_last": "mean, last tenth"}


def _rows(
    runs: Sequence[ComparedRun], prefix: str, labels: Mapping[str, str], found: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    return [
        {"metric": f"{prefix}{label}", **{each.run: values.get(key) for each, values in zip(runs, found, strict=True)}}
        for key, label in labels.items()
        if any(_is_shown(key, values.get(key)) for values in found)
    ]


def _is_shown(key: str, value: object) -> bool:
    return bool(value) or (value is not None and (key in SHOWN_AS_0 or key.startswith("heldout_") or value is False))


def text_rows(runs: Sequence[ComparedRun]) -> list[dict[str, str]]:
    """Return `metric_rows` as text, with the digits of the page."""
    rows = metric_rows(runs)
    return [{name: str(value) if name == "metric" else shown(value) for name, value in row.items()} for row in rows]


def _charts(runs: Sequence[ComparedRun]) -> list[Chart]:
    trained = {each.run: batches(each.metrics) for each in runs}
    start = {each.run: min((metric.measured_at for metric in each.metrics), default=0) for each in runs}
    trajectories, elapsed = Axis("trajectories trained", count, low=0), Axis("time since the start", clock, low=0)
    version = Axis("weight version", lambda value: f"{value:.0f}", low=0)

    def over_trajectories(key: str) -> dict[str, Points]:
        return {run: batch_values(own, key) for run, own in trained.items()}

    def over_time(value: Callable[[Batch], float | None]) -> dict[str, Points]:
        found = {run: [((each.at - start[run]) / 1000, value(each)) for each in own] for run, own in trained.items()}
        return {run: [(x, y) for x, y in points if y is not None] for run, points in found.items()}

    by_time = over_time(lambda batch: batch.values.get("reward/mean"))
    trajectories_by_time = over_time(lambda batch: batch.cumulative)
    held_out = {
        each.run: [(found.version, found.greedy) for found in evaluations(each.metrics) if found.greedy is not None]
        for each in runs
    }
    return [
        _plot(
            "Mean reward by trajectories", _smooth(over_trajectories("reward/mean")), trajectories, Axis("mean reward")
        ),
        _plot("Mean reward by time", _smooth(by_time), elapsed, Axis("mean reward")),
        _plot("Accuracy on held-out questions, greedy", held_out, version, Axis("accuracy", low=0, high=1)),
        _plot("Trajectories trained by time", trajectories_by_time, elapsed, Axis("trajectories", count, low=0)),
        _plot("Staleness", over_trajectories("staleness/mean"), trajectories, Axis("versions")),
        _plot("Response length", over_trajectories("response_length/mean"), trajectories, Axis("tokens")),
    ]


def _smooth(series: Mapping[str, Points]) -> dict[str, Points]:
    return {run: smoothed(points, SMOOTHING) for run, points in series.items()}


def _plot(title: str, series: Mapping[str, Points], x: Axis, y: Axis) -> Chart:
    lines = [Line(run, points, number) for number, (run, points) in enumerate(series.items())]
    return Chart(title, line_plot(title, lines, x, y))


def _metric_table(runs: Sequence[ComparedRun]) -> str:
    head = "".join(f"<th>{escape(each.run)}</th>" for each in runs)
    rows = ""
    for row in metric_rows(runs):
        cells = "".join(f"<td>{escape(shown(row[each.run]))}</td>" for each in runs)
        rows += f"<tr><td>{escape(row['metric'])}</td>{cells}</tr>"
    return f"<table><tr><th></th>{head}</tr>{rows}</table>"
