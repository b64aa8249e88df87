"""Predictions of clusters and costs for people: lines, a table of candidates, a plot as a document of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from rich.table import Table

from pipelines.present.plots import Axis, Line, line_plot
from pipelines.simulate.prediction.cluster import Cluster
from pipelines.simulate.prediction.cost import StepCost
from pipelines.simulate.prediction.measurement import Prediction
from pipelines.simulate.prediction.search import Candidate

COLOURS = ("#0b6bcb", "#b87400", "#2e7d32")
STYLE = (
    "text{font:11px sans-serif;fill:#5b5b60}.level-label{fill:#1d1d1f}.grid{stroke:#e3e3e6}.axis{stroke:#8a8a8f}"
    ".level{stroke:#1d1d1f;stroke-dasharray:5 4;opacity:.7}polyline{fill:none;stroke-width:2}"
    + "".join(f"polyline.c{at}{{stroke:{colour}}}circle.c{at}{{fill:{colour}}}" for at, colour in enumerate(COLOURS))
    + ".page{fill:#fff}"
)


def standalone(plot: str, title: str, labels: Sequence[str]) -> str:
    """The SVG element in `plot` as a document; `labels` are those of its colours, in order."""
    head, _, content = plot[: plot.index("</svg>")].partition(">")
    keys = "".join(
        f'<circle class="c{at}" cx="{70 + 210 * at}" cy="194" r="4"/>'
        f'<text x="{80 + 210 * at}" y="198">{escape(label)}</text>'
        for at, label in enumerate(labels)
    )
    page = '<rect class="page" width="100%" height="100%"/>'
    about = f"<title>{escape(title)}</title>"
    return f'{head} xmlns="http://www.w3.org/2000/svg">{about}<style>{STYLE}</style>{page}{content}{keys}</svg>\n'


TITLE = "Predicted throughput over the trainer's share of the GPUs"


def prediction_lines(cluster: Cluster, found: Prediction, gpu_hour: float) -> Iterator[str]:
    """One prediction as text."""
    yield from _heading(cluster)
    yield f"  trained tokens/s      {found.trained_tokens_per_s:,.0f} (with prompts)"
    yield f"  generated tokens/s    {found.generated_tokens_per_s:,.0f}"
    yield f"  seconds an iteration  {found.iteration_s:,.1f}"
    yield f"  idle: trainer         {_percent(found.trainer_idle)}"
    yield f"  idle: rollouts        {_percent(found.rollout_idle)}"
    yield f"  idle: all GPUs        {_percent(found.bubbles)}"
    yield f"  KV use                {_percent(found.kv_use)}"
    yield f"  staleness             mean {found.staleness_mean:.2f}, at most {found.staleness_max}"
    yield f"  trajectory latency    {found.latency_s:,.1f} s"
    hop, batch = cluster.overheads.hop_s, cluster.overheads.batch_s
    yield f"  between roles         {hop:.3f} s, and {batch:.3f} s a batch (assumed or measured, not predicted)"
    yield f"  GPU hours / 10⁹ tokens  {found.gpu_hours_per_billion_tokens:,.1f}"
    if gpu_hour:
        yield f"  cost / 10⁹ tokens     {found.gpu_hours_per_billion_tokens * gpu_hour:,.2f}"


def _heading(cluster: Cluster) -> Iterator[str]:
    yield f"{cluster.train_gpus} GPUs train, {cluster.replicas} replicas of {cluster.gpus_per_replica} GPUs generate"
    if ignored := _ignored(cluster):
        yield ignored


def _ignored(cluster: Cluster) -> str:
    names = cluster.not_predicted
    return f"Not predicted: the effect of {', '.join(names)}" if names else ""


def candidates_table(candidates: Sequence[Candidate], best: Candidate, gpu_hour: float) -> Table:
    """All candidates; the recommended one is marked."""
    table = Table(title=f"Recommended: {best.name}", caption=_ignored(best.cluster) or None)
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


def cost_lines(cluster: Cluster, found: StepCost) -> Iterator[str]:
    """A step and a day as text, one figure a line, after what is assumed."""
    day = found.to_json()["day"]
    yield from _heading(cluster)
    if cluster.assumed:
        yield "Assumed:"
        yield from (f"  {each}" for each in cluster.assumed)
    yield (
        f"A step: {found.trajectories:,} trajectories of {found.prompt_tokens:,} prompt and "
        f"{found.response_tokens:,} response tokens, {found.seconds:,.1f} s"
    )
    yield from _row("GPU hours: trainer", f"{found.train_gpu_hours:,.2f}")
    yield from _row("GPU hours: rollouts", f"{found.rollout_gpu_hours:,.2f}")
    yield from _row(f"MB in Kafka, {found.copies} copies", _megabytes(found.written_bytes))
    for topic, size in sorted(found.log_bytes.items(), key=lambda item: -item[1]):
        yield from _row(f"  {topic}", _megabytes(found.copies * size))
    if found.price is not None:
        yield from _row("price", f"{found.price:,.2f}")
    yield f"A day: {day['steps']:,.0f} steps"
    yield from _row("GPU hours", f"{day['gpu_hours']:,.0f}")
    yield from _row("GB in Kafka", f"{day['written_bytes'] / 1e9:,.1f}")
    if day["price"] is not None:
        yield from _row("price", f"{day['price']:,.2f}")


def _row(name: str, value: str) -> Iterator[str]:
    yield f"  {name:<24} {value:>12}"


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f}"
