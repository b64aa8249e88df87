"""Predictions of clusters for people: lines, a table of candidates, a plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from pipelines.present.report.plots import Axis, Line, line_plot
from pipelines.present.report.standalone_plot import standalone
from pipelines.simulate.prediction.cluster import Cluster
from pipelines.simulate.prediction.measurement import Prediction
from pipelines.simulate.prediction.search import Candidate

TITLE = "Predicted throughput over the trainer's share of the GPUs"


def prediction_lines(cluster: Cluster, found: Prediction, gpu_hour: float) -> Iterator[str]:
    """One prediction as text."""
    yield f"{cluster.train_gpus} GPUs train, {cluster.replicas} replicas of {cluster.gpus_per_replica} GPUs generate"
    yield f"  trained tokens/s      {found.trained_tokens_per_s:,.0f}"
    yield f"  generated tokens/s    {found.generated_tokens_per_s:,.0f}"
    yield f"  seconds an iteration  {found.iteration_s:,.1f}"
    yield f"  idle: trainer         {_percent(found.trainer_idle)}"
    yield f"  idle: rollouts        {_percent(found.rollout_idle)}"
    yield f"  idle: all GPUs        {_percent(found.bubbles)}"
    yield f"  KV use                {_percent(found.kv_use)}"
    yield f"  staleness             mean {found.staleness_mean:.2f}, at most {found.staleness_max}"
    yield f"  trajectory latency    {found.latency_s:,.1f} s"
    yield f"  GPU hours / 10⁹ tokens  {found.gpu_hours_per_billion_tokens:,.1f}"
    if gpu_hour:
        yield f"  cost / 10⁹ tokens     {found.gpu_hours_per_billion_tokens * gpu_hour:,.2f}"


def candidates_table(candidates: Sequence[Candidate], best: Candidate, gpu_hour: float) -> Table:
    """All candidates; the recommended one is marked."""
    table = Table(title=f"Recommended: {best.name}")
    names = (
        "tokens/s",
        "idle GPUs",
        "KV use",
        "staleness",
        "at most",
        "GPU h / 10⁹ tokens",
        *(["cost"] if gpu_hour else []),
    )
    for column in ("varied", "cluster", *names):
        table.add_column(column, justify="left" if column in ("varied", "cluster") else "right")
    for each in candidates:
        found = each.prediction
        if found is None:
            table.add_row(each.kind, each.name, each.error)
            continue
        hours = found.gpu_hours_per_billion_tokens
        cells = [
            f"{found.trained_tokens_per_s:,.0f}",
            _percent(found.bubbles),
            _percent(found.kv_use),
            f"{found.staleness_mean:.2f}",
            str(found.staleness_max),
            f"{hours:,.1f}",
            *([f"{hours * gpu_hour:,.2f}"] if gpu_hour else []),
        ]
        table.add_row(each.kind, each.name, *cells, style="bold" if each is best else None)
    return table


def candidates_plot(candidates: Sequence[Candidate]) -> str:
    """Throughput over the trainer's share of the GPUs as an SVG document: splits as a line, all others as dots."""
    points: dict[str, list[tuple[float, float]]] = {}
    for each in candidates:
        if each.prediction is not None:
            kind = "split" if each.kind == "present" else each.kind
            share = each.cluster.train_gpus / each.cluster.gpus
            points.setdefault(kind, []).append((share, each.prediction.trained_tokens_per_s))
    lines = [Line(kind, sorted(found), at, dots=True) for at, (kind, found) in enumerate(points.items())]
    x = Axis("the trainer's share of the GPUs", lambda value: f"{100 * value:.0f} %", low=0, high=1)
    drawn = line_plot(TITLE, lines, x, Axis("trained tokens/s", lambda value: f"{value:,.0f}", low=0))
    return standalone(drawn, TITLE, list(points))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
