"""Renders an outline as text and as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from pipelines.run.submission.outline import Outline, TopicUse

BOX, GAP, LINE = (300, 40), 28, 15
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1d1d1f}.small{font-size:11px;fill:#6e6e73}"
    ".topic{fill:#eef4ff;stroke:#4f7cd1}.step{fill:#fff;stroke:#1d1d1f}.edge{stroke:#6e6e73;fill:none}"
)


def text(outline: Outline) -> str:
    """The outline as text: topics read, steps, topics written, options, and what is missing."""
    return "\n".join(_lines(outline))


def _lines(outline: Outline) -> Iterator[str]:
    yield f"{outline.role} of run {outline.run or '(no name)'}, runner {outline.runner}"
    yield ""
    yield from (f"  {each.name:<48} {_partitions_text(each)}" for each in outline.reads)
    for label, what in outline.steps:
        yield "      │"
        yield "      ▼"
        yield f"  {label:<48} {what}"
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
    wide, high = BOX
    columns = [
        [(each.name, _partitions_text(each), "topic") for each in outline.reads],
        [(label, what, "step") for label, what in outline.steps],
        [(each.name, _partitions_text(each), "topic") for each in outline.writes],
    ]
    tallest = max(1, *map(len, columns))
    height = tallest * (high + GAP) + GAP
    places = [
        _places(len(column), column_at * (wide + 3 * GAP) + GAP, height) for column_at, column in enumerate(columns)
    ]
    width = 3 * wide + 8 * GAP
    parts = [
        _box(x, y, *box)
        for column, corners in zip(columns, places, strict=True)
        for box, (x, y) in zip(column, corners, strict=True)
    ]
    parts += [_edge(a, b, down=True) for a, b in zip(places[1], places[1][1:], strict=False)]
    if places[1]:
        parts += [_edge(corner, places[1][0]) for corner in places[0]]
        parts += [_edge(places[1][-1], corner) for corner in places[2]]
    arrow = (
        '<marker id="to" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#6e6e73"/></marker>'
    )
    title = f"<title>{escape(outline.role)} of run {escape(outline.run)}</title>"
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    body = "\n".join(parts)
    head = f"{title}<style>{_STYLE}</style><defs>{arrow}</defs>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{head}\n{body}\n</svg>\n'


def _places(count: int, x: int, height: int) -> list[tuple[int, int]]:
    """The upper left corners of `count` boxes, vertically centred."""
    pitch = BOX[1] + GAP
    top = (height - count * pitch + GAP) // 2
    return [(x, top + at * pitch) for at in range(count)]


def _box(x: int, y: int, name: str, below: str, kind: str) -> str:
    wide, high = BOX
    return (
        f'<rect class="{kind}" x="{x}" y="{y}" width="{wide}" height="{high}" rx="6"/>'
        f'<text x="{x + 10}" y="{y + 17}">{escape(_short(name))}</text>'
        f'<text class="small" x="{x + 10}" y="{y + 17 + LINE}">{escape(_short(below))}</text>'
    )


def _edge(a: tuple[int, int], b: tuple[int, int], down: bool = False) -> str:
    wide, high = BOX
    if down:
        ends: Sequence[int] = (a[0] + wide // 2, a[1] + high, b[0] + wide // 2, b[1])
    else:
        ends = (a[0] + wide, a[1] + high // 2, b[0], b[1] + high // 2)
    return '<path class="edge" marker-end="url(#to)" d="M{} {}L{} {}"/>'.format(*ends)


def _short(name: str) -> str:
    return name if len(name) <= 42 else f"{name[:20]}…{name[-20:]}"


def _partitions_text(topic: TopicUse) -> str:
    partitions = f"{topic.partitions} partition{'s' if topic.partitions > 1 else ''}"
    if topic.existing is None:
        return f"{partitions}, not created yet"
    return (
        partitions
        if topic.existing == topic.partitions
        else f"{partitions} configured, but the topic has {topic.existing}"
    )
