"""A heat map of many series over time: one row for each series; darker is more. Lines would hide one another."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from itertools import groupby

from pipelines.present.report.plots import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Points,
    no_data,
    svg,
    text_at,
    ticks,
)

COLUMNS = 160
SHADES = 12


def heat_map(title: str, rows: Mapping[str, Points], x: Axis, shade: Axis) -> str:
    """Return the SVG with `rows` from top to bottom; `shade` is the axis of the darkness."""
    shown = {name: points for name, points in rows.items() if points}
    if not shown:
        return no_data(title)
    times = [at for points in shown.values() for at, _ in points]
    begin, end = (min(times) if x.low is None else x.low), max(times)
    most = shade.high or max(value for points in shown.values() for _, value in points) or 1.0
    high, wide = (HEIGHT - BOTTOM - TOP) / len(shown), (WIDTH - RIGHT - LEFT) / COLUMNS
    parts = []
    label_every = -(-len(shown) // 16)  # there is room for sixteen names
    for row, (name, points) in enumerate(shown.items()):
        top = TOP + row * high
        if row % label_every == 0:
            parts.append(text_at(LEFT - 6, top + high / 2 + 4, name, "end"))
        at = 0
        for level, run in groupby(_levels(points, begin, end, most)):
            width = len(list(run))
            if level:
                parts.append(
                    f'<rect class="c0" x="{LEFT + at * wide:.1f}" y="{top:.1f}" width="{width * wide:.1f}" '
                    f'height="{max(high - 1, 0.5):.1f}" fill-opacity="{level / SHADES:.2f}"/>'
                )
            at += width
    for mark in ticks(begin, end):
        place = LEFT + (mark - begin) / ((end - begin) or 1.0) * (WIDTH - RIGHT - LEFT)
        parts.append(text_at(place, HEIGHT - BOTTOM + 15, x.text(mark), "middle"))
    label = f"{x.label}; darkest: {shade.text(most)}"
    parts.append(text_at((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, escape(label), "middle", "label"))
    return svg(title, parts)


def _levels(points: Points, begin: float, end: float, most: float) -> list[int]:
    """Return the shade of each column, 0 to SHADES: the mean of its points, or the previous shade if it has none."""
    sums, counts = [0.0] * COLUMNS, [0] * COLUMNS
    for at, value in points:
        column = min(COLUMNS - 1, int((at - begin) / ((end - begin) or 1.0) * COLUMNS))
        sums[column] += value
        counts[column] += 1
    levels, last = [], 0
    final = max(column for column in range(COLUMNS) if counts[column])
    for column in range(COLUMNS):
        if counts[column]:
            last = round(min(1.0, max(0.0, sums[column] / counts[column] / most)) * SHADES)
        levels.append(last if column <= final else 0)
    return levels
