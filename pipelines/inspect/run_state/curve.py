"""A series of a run for a plot, of bounded size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MAX_POINTS = 512


class Point(NamedTuple):
    """The mean `y` of `values` values, the last of them at `x`."""

    x: float
    y: float
    values: int


@dataclass(frozen=True, slots=True)
class Curve:
    """Points by rising x, at most `MAX_POINTS`."""

    points: tuple[Point, ...] = ()

    def add(self, x: float, y: float) -> Curve:
        """The curve with (x, y) at its end. Points at `x` or beyond are removed: a restarted role repeats its steps."""
        kept = self.points
        while kept and kept[-1].x >= x:
            kept = kept[:-1]
        kept = (*kept, Point(x, y, 1))
        return _bounded(kept)

    def put(self, x: float, y: float) -> Curve:
        """The curve with (x, y) inserted in order, replacing a point at `x`: for values that arrive out of order."""
        others = [point for point in self.points if point.x != x]
        return _bounded(tuple(sorted([*others, Point(x, y, 1)])))

    def __len__(self) -> int:
        return len(self.points)

    @property
    def last(self) -> Point | None:
        return self.points[-1] if self.points else None

    def recent_mean(self, points: int) -> float | None:
        """The mean of y over the last `points` points; None without any."""
        recent = self.points[-points:]
        return _mean(recent) if recent else None


def _bounded(points: tuple[Point, ...]) -> Curve:
    if len(points) <= MAX_POINTS:
        return Curve(points)
    pairs = [points[first : first + 2] for first in range(0, len(points), 2)]
    return Curve(tuple(Point(pair[-1].x, _mean(pair), sum(point.values for point in pair)) for pair in pairs))


def _mean(points: tuple[Point, ...]) -> float:
    return sum(point.y * point.values for point in points) / sum(point.values for point in points)


NO_POINTS = Curve()
