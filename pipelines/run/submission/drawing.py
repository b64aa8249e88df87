"""Renders an outline as text and as SVG."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from infra.counted import counted
from pipelines.run.submission.outline import GraphStep, Outline, TopicUse
from pipelines.run.submission.shapes import Box, arrow, document, stack

WIDTH, GAP = 300, 28


def text(outline: Outline) -> str:
    """The outline as text: topics read, steps, topics written, options, and what is missing."""
    return "\n".join(_lines(outline))


def _lines(outline: Outline) -> Iterator[str]:
    yield f"{outline.role} of run {outline.run or '(no name)'}, runner {outline.runner}"
    yield ""
    yield from (f"  {each.name:<48} {_partitions_text(each)}" for each in outline.reads)
    for step in outline.steps:
        yield "      │"
        yield "      ▼"
        yield f"  {step.name:<48} {step.description}"
        yield from (f"    · {phase}" for phase in step.phases)
    if outline.steps:
        yield "      │"
        yield "      ▼"
    yield from (f"  {each.name:<48} {_partitions_text(each)}" for each in outline.writes)
    yield ""
    yield "options"
    yield from (f"  {option}" for option in outline.options)
    yield "missing"
    yield from (f"  {each}" for each in outline.missing or ("nothing",))


def svg(outline: Outline) -> str:
    """The graph as SVG: a column of topics read, one of steps, one of topics written."""
    columns = [
        [_topic_box(GAP, each) for each in outline.reads],
        [_step_box(WIDTH + 4 * GAP, each) for each in outline.steps],
        [_topic_box(2 * WIDTH + 7 * GAP, each) for each in outline.writes],
    ]
    height = GAP + max(60, *(sum(box.height + GAP for box in column) for column in columns))
    reads, steps, writes = (stack(column, height, GAP) for column in columns)
    parts = [box.svg() for box in (*reads, *steps, *writes)]
    parts += [arrow((a.centre, a.bottom), (b.centre, b.y)) for a, b in pairwise(steps)]
    if steps:
        parts += [arrow((box.right, box.middle), (steps[0].x, steps[0].middle)) for box in reads]
        parts += [arrow((steps[-1].right, steps[-1].middle), (box.x, box.middle)) for box in writes]
    return document(f"{outline.role} of run {outline.run}", 3 * WIDTH + 8 * GAP, height, parts)


def _step_box(x: int, step: GraphStep) -> Box:
    phases = tuple(f"· {phase}" for phase in step.phases)
    return Box(x, 0, WIDTH, step.name, (step.description, *phases), "map" if step.topics else "step")


def _topic_box(x: int, topic: TopicUse) -> Box:
    return Box(x, 0, WIDTH, topic.name, (_partitions_text(topic),), "topic")


def _partitions_text(topic: TopicUse) -> str:
    partitions = counted(topic.partitions, "partition")
    if topic.existing is None:
        return f"{partitions}, not created yet"
    differs = f" configured, but the topic has {topic.existing}" if topic.existing != topic.partitions else ""
    return partitions + differs
