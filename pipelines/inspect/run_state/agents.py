"""Totals of the episodes of agents: the metric `agents`, one for each process of the gateway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from schemas.records import Metric

NAME = "agents"


def agents_of(metrics: Sequence[Metric]) -> dict[str, float] | None:
    """The totals of all processes of the gateway; None without episodes."""
    newest: dict[int, Metric] = {}
    for metric in metrics:
        if metric.name == NAME and metric.measured_at >= newest.get(metric.step, metric).measured_at:
            newest[metric.step] = metric
    totals: Counter[str] = Counter()
    for metric in newest.values():
        totals.update(metric.values)
    return {name: float(value) for name, value in totals.items()} or None


def agent_rows(totals: Mapping[str, float]) -> list[tuple[str, str]]:
    """Label and text of each figure, means of an episode; a share is that of the time of all episodes."""
    episodes = totals.get("episodes", 0) or 1
    seconds = {name: totals.get(f"{name}_s", 0.0) for name in ("model", "agent", "waiting")}
    whole = sum(seconds.values()) or 1
    labels = {
        "model": "in requests to the model",
        "agent": "between requests: tools and the agent",
        "waiting": "before the first request",
    }
    return [
        ("episodes", f"{totals.get('episodes', 0):,.0f}"),
        ("episodes failed", f"{totals.get('failed', 0):,.0f}"),
        ("turns of an episode", f"{totals.get('turns', 0) / episodes:.1f}"),
        ("conversations of an episode", f"{totals.get('conversations', 0) / episodes:.1f}"),
        ("tool calls of an episode", f"{totals.get('tool_calls', 0) / episodes:.1f}"),
        ("turns whose template rewrites earlier messages", f"{totals.get('rewritten', 0):,.0f}"),
        *(
            (label, f"{seconds[name] / episodes:.2f} s ({100 * seconds[name] / whole:.0f} %)")
            for name, label in labels.items()
        ),
    ]
