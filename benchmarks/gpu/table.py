"""Figures that compare parts, and the table of all figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from benchmarks.gpu.figures import Figure
from benchmarks.gpu.parts import Outcome

Outcomes = Mapping[str, Outcome]


def comparisons(outcomes: Outcomes) -> list[Figure]:
    """Ratios of parts, and the share of the device's matrix products that the model's own take."""
    engine, learner = "engine, CUDA graphs", "learner, bfloat16"
    pairs = (
        ("CUDA graphs over eager", (engine, "tokens"), ("engine, eager", "tokens"), (">=", 1.0)),
        ("engine over generate", (engine, "tokens"), ("engine, generate", "tokens"), (">=", 1.0)),
        ("learner over plain loop, bfloat16", (learner, "trained"), ("plain loop, bfloat16", "trained"), (">=", 0.95)),
        (
            "the learner over any order of sums",
            (learner, "trained"),
            ("learner, any order of sums", "trained"),
            (">=", 0.9),
        ),
        (
            "learner over plain loop, float32",
            ("learner, float32", "trained"),
            ("plain loop, float32", "trained"),
            (">=", 0.95),
        ),
        (
            "offloaded moments over the learner",
            ("learner, offloaded moments", "trained"),
            (learner, "trained"),
            (">=", 0.5),
        ),
        (
            "all GPUs over one",
            ("learner, all GPUs", "trained"),
            (learner, "trained"),
            (">=", 1.0),
        ),
        (
            "one rank of FSDP2 over the learner",
            ("learner, one rank of FSDP2", "trained"),
            (learner, "trained"),
            (">=", 0.9),
        ),
        ("kept gathered over the learner", ("learner, kept gathered", "trained"), (learner, "trained"), (">=", 0.9)),
        (
            "vLLM, its sampler over our draws",
            ("vLLM, its sampler", "tokens"),
            ("vLLM, our draws", "tokens"),
            (">=", 1.0),
        ),
        ("a draw over a step", ("draws", "a draw for every slot"), (engine, "a step"), ("<=", 0.2)),
    )
    figures = []
    for name, above, below, goal in pairs:
        first, second = find(outcomes, *above), find(outcomes, *below)
        if first is not None and second:
            figures.append(Figure(name, first / second, "", goal))
    return [*figures, *_utilisation(outcomes)]


def find(outcomes: Outcomes, part: str, name: str) -> float | None:
    """The value of figure `name` of `part`, None if it was not measured."""
    figures = outcomes[part].figures if part in outcomes else []
    found = next((figure.value for figure in figures if figure.name == name), math.nan)
    return None if math.isnan(found) else found


def render(outcomes: Outcomes) -> str:
    """The table: a line for each figure, under the name of its part."""
    lines = [f"{'part':<28}{'figure':<40}{'value':>12} {'unit':<10}{'goal':<10}note"]
    for part, outcome in outcomes.items():
        for number, figure in enumerate(outcome.figures):
            lines.append(f"{part if not number else '':<28}{_line(figure)}")
        if outcome.error:
            lines.append(f"{part:<28}not measured: {outcome.error}")
    failed = [f"{part}: {figure.name}" for part, figure in _all(outcomes) if figure.passed is False]
    lines += ["", "goals not reached: " + ("; ".join(failed) or "none")]
    return "\n".join(lines)


def _utilisation(outcomes: Outcomes) -> Iterator[Figure]:
    parameters = find(outcomes, "model", "parameters")
    for part, precision in (
        ("learner, bfloat16", "bfloat16"),
        ("plain loop, bfloat16", "bfloat16"),
        ("learner, checkpointing", "bfloat16"),
        ("learner, one rank of FSDP2", "bfloat16"),
        ("learner, float32", "float32"),
        ("plain loop, float32", "float32"),
    ):
        trained, roof = find(outcomes, part, "trained"), find(outcomes, "roofs", f"matrix product, {precision}")
        if parameters and trained and roof:
            share = 6 * parameters * 1e6 * trained / (roof * 1e12)
            yield Figure(f"MFU, {part}", 100 * share, "%", note="6 FLOP a parameter and token, of the measured product")


def _line(figure: Figure) -> str:
    value = f"{figure.value:,.3g}" if abs(figure.value) < 100 else f"{figure.value:,.0f}"
    goal = "" if figure.goal is None else f"{figure.goal[0]} {figure.goal[1]:g}"
    mark = "" if figure.passed is not False else "NOT REACHED "
    return f"{figure.name:<40}{value:>12} {figure.unit:<10}{goal:<10}{mark}{figure.note}".rstrip()


def _all(outcomes: Outcomes) -> Iterator[tuple[str, Figure]]:
    for part, outcome in outcomes.items():
        for figure in outcome.figures:
            yield part, figure
