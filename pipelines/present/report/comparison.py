"""Several runs on one page: their figures side by side, and their curves in the same plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from pipelines.present.report.charts import SMOOTHING, Chart
from pipelines.present.report.html import LABELS, shown
from pipelines.present.report.page_style import POLICY, STYLE
from pipelines.present.report.plots import Axis, Line, Points, line_plot, smoothed
from pipelines.present.report.series import Batch, batches, evaluations
from pipelines.present.view.text import clock, count
from schemas.records import Metric


class ComparedRun(NamedTuple):
    """A run: its name, its summary, and what it measured."""

    run: str
    summary: Mapping[str, Any]
    metrics: Sequence[Metric]


def comparison(runs: Sequence[ComparedRun]) -> str:
    """The page, which needs nothing from anywhere else. Everything that comes from the runs is escaped."""
    title = escape(" · ".join(told.run for told in runs))
    plots = "".join(f'<div class="card"><h3>{escape(each.title)}</h3>{each.svg}</div>' for each in _charts(runs))
    return "\n".join(
        [
            f'<!doctype html><html lang="en"><head><meta charset="utf-8">{POLICY}',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title} · Laminar</title><style>{STYLE}</style></head><body><main>",
            f"<h1>{len(runs)} runs</h1><h2>Plots</h2>",
            f'<div class="plots">{plots}</div><h2>Figures</h2><div class="card">{_figures(runs)}</div>',
            "</main></body></html>\n",
        ]
    )


def figures_of(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """A row for each figure that any of them has, and a column for each run."""
    return [
        {"figure": label, **{told.run: told.summary.get(key) for told in runs}}
        for key, label in LABELS.items()
        if any(told.summary.get(key) is not None for told in runs)
    ]


def _charts(runs: Sequence[ComparedRun]) -> list[Chart]:
    trained = {told.run: batches(told.metrics) for told in runs}
    start = {told.run: min((metric.measured_at for metric in told.metrics), default=0) for told in runs}
    many, when = Axis("trajectories trained", count, low=0), Axis("time since the start", clock, low=0)
    version = Axis("weight version", lambda value: f"{value:.0f}", low=0)

    def of(what: Callable[[str, Batch], tuple[float, float | None]]) -> dict[str, Points]:
        found = {run: [what(run, batch) for batch in of_run] for run, of_run in trained.items()}
        return {run: [(x, y) for x, y in points if y is not None] for run, points in found.items()}

    rewards = of(lambda run, batch: (batch.cumulative, batch.values.get("reward/mean")))
    by_time = of(lambda run, batch: ((batch.at - start[run]) / 1000, batch.values.get("reward/mean")))
    held_out = {
        told.run: [(each.version, each.greedy) for each in evaluations(told.metrics) if each.greedy is not None]
        for told in runs
    }
    return [
        _plot("Training reward by trajectories", _smooth(rewards), many, Axis("reward")),
        _plot("Training reward by time", _smooth(by_time), when, Axis("reward")),
        _plot("Accuracy on held-out questions, greedy", held_out, version, Axis("accuracy", low=0, high=1)),
        _plot(
            "Trajectories trained by time",
            of(lambda run, batch: ((batch.at - start[run]) / 1000, batch.cumulative)),
            when,
            Axis("trajectories", count, low=0),
        ),
        _plot(
            "Staleness", of(lambda run, batch: (batch.cumulative, batch.values.get("staleness/mean"))), many, Axis("")
        ),
        _plot(
            "Response length",
            of(lambda run, batch: (batch.cumulative, batch.values.get("response_length/mean"))),
            many,
            Axis("tokens"),
        ),
    ]


def _smooth(series: Mapping[str, Points]) -> dict[str, Points]:
    return {run: smoothed(points, SMOOTHING) for run, points in series.items()}


def _plot(title: str, series: Mapping[str, Points], x: Axis, y: Axis) -> Chart:
    lines = [Line(run, points, number) for number, (run, points) in enumerate(series.items())]
    return Chart(title, line_plot(title, lines, x, y))


def _figures(runs: Sequence[ComparedRun]) -> str:
    head = "".join(f"<th>{escape(told.run)}</th>" for told in runs)
    rows = ""
    for row in figures_of(runs):
        cells = "".join(f"<td>{escape(shown(row[told.run]))}</td>" for told in runs)
        rows += f"<tr><td>{escape(row['figure'])}</td>{cells}</tr>"
    return f"<table><tr><th></th>{head}</tr>{rows}</table>"
