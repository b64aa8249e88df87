"""The cost of a step for people."""

from __future__ import annotations

from collections.abc import Iterator

from pipelines.simulate.prediction.cluster import Cluster
from pipelines.simulate.prediction.cost import StepCost


def cost_lines(cluster: Cluster, found: StepCost) -> Iterator[str]:
    """A step and a day as text, one figure a line."""
    day = found.to_json()["day"]
    yield f"{cluster.train_gpus} GPUs train, {cluster.replicas} replicas of {cluster.gpus_per_replica} GPUs generate"
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
