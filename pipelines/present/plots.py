"""Plots as SVG text: lines, bars, a timeline, a heat map. Colours are CSS classes, which the page defines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 40
COLOURS = 8
MAX_POINTS = 400

Points = Sequence[tuple[float, float]]
FormatNumber = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a plot. `faint`: in the background of another line; `dots`: with a dot at each point."""

    label: str
    points: Points
    colour: int = 0
    faint: bool = False
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Level:
    """A labelled horizontal line at `y`."""

    label: str
    y: float


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: its label, the format of its numbers, and optional fixed bounds."""

    label: str
    text: FormatNumber = lambda value: f"{value:g}"
    low: float | None = None
    high: float | None = None


def line_plot(title: str, lines: Sequence[Line], x: Axis, y: Axis, levels: Sequence[Level] = ()) -> str:
    """Return the lines over a common pair of axes; a sentence if there is no data."""
    shown = [replace(each, points=thinned(each.points)) for each in lines if each.points]
    if not shown:
        return no_data(title)
    ys = [value for each in shown for _, value in each.points] + [level.y for level in levels]
    xs = [value for each in shown for value, _ in each.points]
    across = _Scale.over(xs, x, LEFT, WIDTH - RIGHT)
    up = _Scale.over(ys, y, HEIGHT - BOTTOM, TOP, nice=True)
    parts = [*_grid(across, up, x, y)]
    for level in levels:
        at = up(level.y)
        above = at - TOP > 16
        parts.append(f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(
            f'<text class="level-label" x="{LEFT + 6}" y="{at + (-5 if above else 14):.1f}">'
            f"{escape(level.label)}</text>"
        )
    for each in shown:
        kind = f"c{each.colour % COLOURS}" + (" faint" if each.faint else "")
        path = " ".join(f"{across(a):.1f},{up(b):.1f}" for a, b in each.points)
        parts.append(f'<polyline class="{kind}" points="{path}"/>')
        if each.dots or len(each.points) == 1:
            parts += [
                f'<circle class="{kind}" cx="{across(a):.1f}" cy="{up(b):.1f}" r="3">'
                f"<title>{escape(f'{each.label}: {x.text(a)}, {y.text(b)}')}</title></circle>"
                for a, b in each.points
            ]
    return svg(title, parts) + legend([each for each in shown if not each.faint])


def bar_plot(title: str, bars: Mapping[str, float], x: Axis, y: Axis) -> str:
    """Return a bar for each value, in the given order, labelled with its share of the total."""
    if not any(bars.values()):
        return no_data(title)
    up = _Scale.over([0.0, *bars.values()], y, HEIGHT - BOTTOM, TOP + 14, nice=True)
    total, room = sum(bars.values()), (WIDTH - LEFT - RIGHT) / len(bars)
    thick = min(70.0, room * 0.7)
    parts = [*_grid(None, up, x, y)]
    for index, (label, value) in enumerate(bars.items()):
        middle, top = LEFT + room * (index + 0.5), up(value)
        parts.append(
            f'<rect class="c0" x="{middle - thick / 2:.1f}" y="{top:.1f}" width="{thick:.1f}" '
            f'height="{up(0.0) - top:.1f}"><title>{escape(f"{label}: {y.text(value)}")}</title></rect>'
        )
        parts.append(text_at(middle, HEIGHT - BOTTOM + 15, label, "middle"))
        parts.append(text_at(middle, top - 5, f"{100 * value / total:.0f} %", "middle"))
    return svg(title, parts)


def timeline(title: str, spans: Sequence[tuple[str, float]], text: FormatNumber) -> str:
    """Return consecutive spans, each as wide as its duration, with names if they fit, and a legend."""
    total = sum(seconds for _, seconds in spans)
    if total <= 0:
        return no_data(title)
    width, height, at = 2 * WIDTH, 46, 0.0
    parts = []
    for index, (name, seconds) in enumerate(spans):
        wide = seconds / total * width
        label = f"{name} {text(seconds)}"
        parts.append(
            f'<rect class="c{index % COLOURS}" x="{at:.1f}" y="4" width="{max(wide - 1.5, 0.5):.1f}" height="26" '
            f'rx="2"><title>{escape(label)}</title></rect>'
        )
        if wide > 8 * len(name) + 12:
            parts.append(f'<text class="on" x="{at + wide / 2:.1f}" y="22" text-anchor="middle">{escape(name)}</text>')
        at += wide
    named = [Line(f"{name} {text(seconds)}", (), index) for index, (name, seconds) in enumerate(spans)]
    return svg(title, parts, width, height - 12) + legend(named)


def legend(lines: Sequence[Line]) -> str:
    """Return the legend: the colour and label of each line."""
    keys = "".join(
        f'<span class="key"><i class="c{each.colour % COLOURS}"></i>{escape(each.label)}</span>' for each in lines
    )
    return f'<p class="legend">{keys}</p>'


def no_data(title: str) -> str:
    """Return the sentence that replaces a plot without data."""
    return f'<p class="nothing" role="img" aria-label="{escape(title)}">no data</p>'


def thinned(points: Points) -> list[tuple[float, float]]:
    """Return at most `MAX_POINTS` points in ascending x, each the mean of neighbouring points."""
    ordered = sorted(points)
    width = math.ceil(len(ordered) / MAX_POINTS) or 1
    groups = [ordered[first : first + width] for first in range(0, len(ordered), width)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def smoothed(points: Points, width: int) -> list[tuple[float, float]]:
    """Return the mean of the `width` points around each point, of fewer at the ends."""
    half = width // 2
    result = []
    for index, (x, _) in enumerate(points):
        around = points[max(0, index - half) : index + half + 1]
        result.append((x, sum(y for _, y in around) / len(around)))
    return result


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return about `most` round numbers (1, 2 or 5 times a power of ten) from `low` to `high`."""
    if high <= low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    first: float
    last: float

    @classmethod
    def over(cls, values: Sequence[float], axis: Axis, first: float, last: float, nice: bool = False) -> _Scale:
        low = min(values) if axis.low is None else axis.low
        high = max(values) if axis.high is None else max(axis.high, *values)
        if high <= low:
            high = low + (abs(low) or 1.0)
        if nice:
            marks = ticks(low, high)
            step = marks[1] - marks[0] if len(marks) > 1 else high - low
            low = step * math.floor(low / step + 1e-9) if axis.low is None else low
            high = step * math.ceil(high / step - 1e-9)
        return cls(low, high, first, last)

    def __call__(self, value: float) -> float:
        return self.first + (value - self.low) / (self.high - self.low) * (self.last - self.first)


def _grid(across: _Scale | None, up: _Scale, x: Axis, y: Axis) -> list[str]:
    parts = []
    for mark in ticks(up.low, up.high, 5):
        at = up(mark)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(text_at(LEFT - 6, at + 4, y.text(mark), "end"))
    for mark in ticks(across.low, across.high) if across else ():
        parts.append(text_at(across(mark), HEIGHT - BOTTOM + 15, x.text(mark), "middle"))  # type: ignore[misc]
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>')
    parts.append(text_at((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x.label, "middle", "label"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'transform="rotate(-90 11 {middle:.0f})"'
    parts.append(f'<text class="label" x="11" y="{middle:.0f}" text-anchor="middle" {turned}>{escape(y.label)}</text>')
    return parts


def text_at(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    """Return `text` at a position."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def svg(title: str, parts: Sequence[str], width: int = WIDTH, height: int = HEIGHT) -> str:
    """Return the SVG element of `parts`."""
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
    return f"{head}{''.join(parts)}</svg>"


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
        at, until = 0, max(time for time, _ in points)
        means = binned(points, COLUMNS, begin, end)[: 1 + int((until - begin) / ((end - begin) or 1.0) * COLUMNS)]
        for level, run in groupby(round(min(1.0, max(0.0, (mean or 0.0) / most)) * SHADES) for mean in means):
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


def binned(points: Points, columns: int, begin: float, end: float) -> list[float | None]:
    """Return the mean of y in each of `columns` equal ranges of x; a range without points repeats the previous one."""
    found: list[list[float]] = [[] for _ in range(columns)]
    for x, y in points:
        found[min(columns - 1, int((x - begin) / ((end - begin) or 1.0) * columns))].append(y)
    values: list[float | None] = []
    for each in found:
        values.append(sum(each) / len(each) if each else values[-1] if values else None)
    return values
