"""Curves in braille characters: each is a grid of two columns by four rows of dots."""

from __future__ import annotations

from collections.abc import Sequence

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row from the top, then by column
_BLANK = 0x2800


def resampled(points: Sequence[tuple[float, float]], columns: int) -> list[float | None]:
    """Return the mean of y in each of `columns` equal ranges of x; a range without points repeats the previous one."""
    if not points:
        return [None] * columns
    first, last = points[0][0], points[-1][0]
    sums, counts = [0.0] * columns, [0] * columns
    for x, y in points:
        column = min(columns - 1, int((x - first) / (last - first) * columns)) if last > first else 0
        sums[column] += y
        counts[column] += 1
    values: list[float | None] = []
    for total, count in zip(sums, counts, strict=True):
        values.append(total / count if count else values[-1])
    return values


def plot(points: Sequence[tuple[float, float]], width: int, height: int, low: float, high: float) -> list[str]:
    """Return `height` lines of `width` characters: y over x, from `low` at the bottom to `high` at the top, clipped."""
    rows = height * 4
    cells = [[_BLANK] * width for _ in range(height)]
    before: int | None = None
    columns = 2 * width if len(points) >= 2 else 1
    for column, value in enumerate(resampled(points, columns)):
        if value is None:
            continue
        share = (value - low) / (high - low) if high > low else 0.5
        row = rows - 1 - min(rows - 1, max(0, round(share * (rows - 1))))
        for each in _between(before, row):
            cells[each // 4][column // 2] |= _DOTS[each % 4][column % 2]
        before = row
    return ["".join(map(chr, line)) for line in cells]


def _between(before: int | None, row: int) -> range:
    """Return the rows to fill in a column so that a steep line has no gaps."""
    if before is None or abs(before - row) <= 1:
        return range(row, row + 1)
    return range(row, before) if before > row else range(before + 1, row + 1)
