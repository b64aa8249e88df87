"""prompts: empty polls in, prompts out."""

from __future__ import annotations

from collections.abc import Callable

from role_graph import RoleGraph

from schemas.topics import METRICS, PROMPTS


def test_draw_and_render_writes_prompts_ahead_of_placement(graph: Callable[..., RoleGraph]) -> None:
    outputs = graph("prompts").fold("draw and render", [], lead=3, slack=0)
    assert [output.key for output in outputs if output.topic is PROMPTS] == ["p0", "p1", "p2"]
    (metric,) = [output.record for output in outputs if output.topic is METRICS]
    assert metric.values["prompts"] == 3.0
