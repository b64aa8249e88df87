"""Plots as SVG text: lines, bars and a timeline. Colours are classes, so that the page gives them, light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 40
COLOURS = 8
MAX_POINTS = 400

Points = Sequence[tuple[float, float]]
Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a plot. `faint` for what stands behind another; `dots` for what was measured now and then."""

    label: str
    points: Points
    colour: int = 0
    faint: bool = False
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Level:
    """A horizontal line at `y`, with its label on it."""

    label: str
    y: float


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis says: its label, how its numbers read, and bounds that hold whatever the data are."""

    label: str
    text: Format = lambda value: f"{value:g}"
    low: float | None = None
    high: float | None = None


def line_plot(title: str, lines: Sequence[Line], x: Axis, y: Axis, levels: Sequence[Level] = ()) -> str:
    """Lines over a common pair of axes; a sentence where there is nothing to draw."""
    shown = [
        Line(each.label, thinned(each.points), each.colour, each.faint, each.dots) for each in lines if each.points
    ]
    if not shown:
        return nothing(title)
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
    """A bar each, in the order given, with its share of the whole on it."""
    if not any(bars.values()):
        return nothing(title)
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
        parts.append(written(middle, HEIGHT - BOTTOM + 15, label, "middle"))
        parts.append(written(middle, top - 5, f"{100 * value / total:.0f} %", "middle"))
    return svg(title, parts)


def timeline(title: str, spans: Sequence[tuple[str, float]], text: Format) -> str:
    """What was done one after another, each as wide as it took long; its name where there is room, and a legend."""
    total = sum(seconds for _, seconds in spans)
    if total <= 0:
        return nothing(title)
    width, height, at = 2 * WIDTH, 46, 0.0
    parts = []
    for index, (name, seconds) in enumerate(spans):
        wide = seconds / total * width
        said = f"{name} {text(seconds)}"
        parts.append(
            f'<rect class="c{index % COLOURS}" x="{at:.1f}" y="4" width="{max(wide - 1.5, 0.5):.1f}" height="26" '
            f'rx="2"><title>{escape(said)}</title></rect>'
        )
        if wide > 8 * len(name) + 12:
            parts.append(f'<text class="on" x="{at + wide / 2:.1f}" y="22" text-anchor="middle">{escape(name)}</text>')
        at += wide
    named = [Line(f"{name} {text(seconds)}", (), index) for index, (name, seconds) in enumerate(spans)]
    return svg(title, parts, width, height - 12) + legend(named)


def legend(lines: Sequence[Line]) -> str:
    """Which colour is what."""
    keys = "".join(
        f'<span class="key"><i class="c{each.colour % COLOURS}"></i>{escape(each.label)}</span>' for each in lines
    )
    return f'<p class="legend">{keys}</p>'


def nothing(title: str) -> str:
    """Stands where there is nothing to draw."""
    return f'<p class="nothing" role="img" aria-label="{escape(title)}">nothing was measured</p>'


def thinned(points: Points) -> list[tuple[float, float]]:
    """At most `MAX_POINTS` points by rising x: means of neighbours."""
    ordered = sorted(points)
    width = math.ceil(len(ordered) / MAX_POINTS) or 1
    groups = [ordered[first : first + width] for first in range(0, len(ordered), width)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def smoothed(points: Points, width: int) -> list[tuple[float, float]]:
    """The mean over `width` neighbours around each point, fewer at the ends."""
    half = width // 2
    result = []
    for index, (x, _) in enumerate(points):
        around = points[max(0, index - half) : index + half + 1]
        result.append((x, sum(y for _, y in around) / len(around)))
    return result


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers (1, 2, 5 times a power of ten) within `low` to `high`, at most about `most` of them."""
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
        parts.append(written(LEFT - 6, at + 4, y.text(mark), "end"))
    for mark in ticks(across.low, across.high) if across else ():
        parts.append(written(across(mark), HEIGHT - BOTTOM + 15, x.text(mark), "middle"))  # type: ignore[misc]
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>')
    parts.append(written((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x.label, "middle", "label"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'transform="rotate(-90 11 {middle:.0f})"'
    parts.append(f'<text class="label" x="11" y="{middle:.0f}" text-anchor="middle" {turned}>{escape(y.label)}</text>')
    return parts


def written(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    """A piece of text at a place."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def svg(title: str, parts: Sequence[str], width: int = WIDTH, height: int = HEIGHT) -> str:
    """A whole drawing of `parts`."""
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
    return f"{head}{''.join(parts)}</svg>"
