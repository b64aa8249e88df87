"""Splits the rows of a decode step so that short rows do not attend over the padding of long ones.

Attention over a chunk of rows costs its rows times its longest; one more chunk costs a few more kernel calls. Rows
are in order of age, not length, so they are brought into order from time to time: when the padding attended over
since the last time has cost more than the copying will (rent, then buy).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_CALL_COST = 45_000
"""What one more chunk costs a layer, in multiply-adds: three kernel calls, about 12 µs on one CPU core."""

_COPY_COST = 6
"""What copying a token's KV costs in tokens attended over."""


@dataclass(frozen=True, slots=True)
class AttentionChunk:
    """Rows `start`..`stop`-1, whose longest has `width` tokens; `uniform` if all have."""

    start: int
    stop: int
    width: int
    uniform: bool


def split_rows(lengths: np.ndarray, query_size: int, most: int = 4) -> list[AttentionChunk]:
    """At most `most` chunks of rows with `lengths` (int64[rows]), split where it saves most and more than it costs.

    `query_size` is heads × head size: the multiply-adds of one row over one token.
    """
    least = _CALL_COST // query_size
    parts = [_best_split(lengths, 0, len(lengths), least)]
    while len(parts) < most:
        widest = max(parts, key=lambda part: part.saving)
        if widest.saving <= least:
            break
        parts.remove(widest)
        parts += [
            _best_split(lengths, widest.chunk.start, widest.split, least),
            _best_split(lengths, widest.split, widest.chunk.stop, least),
        ]
    return sorted((part.chunk for part in parts), key=lambda chunk: chunk.start)


@dataclass(frozen=True, slots=True)
class _ChunkSplit:
    """A chunk, where to split it best, and the row-tokens that this saves."""

    chunk: AttentionChunk
    split: int
    saving: int


def _best_split(lengths: np.ndarray, start: int, stop: int, least: int) -> _ChunkSplit:
    part = lengths[start:stop]
    rows, longest = stop - start, int(part.max())
    padding = rows * longest - int(part.sum())
    chunk = AttentionChunk(start, stop, longest, padding == 0)
    if padding <= least:  # a split cannot save more than all the padding: most steps end here
        return _ChunkSplit(chunk, start, 0)
    before = np.maximum.accumulate(part)[:-1]
    after = np.maximum.accumulate(part[::-1])[-2::-1]
    counts = np.arange(1, rows)
    cost = counts * before + (rows - counts) * after
    best = int(cost.argmin())
    return _ChunkSplit(chunk, start + best + 1, rows * longest - int(cost[best]))


class RowOrder:
    """Says when to bring rows into order of length, longest first."""

    def __init__(self) -> None:
        self._wasted = 0

    def due(self, lengths: np.ndarray, chunks: list[AttentionChunk]) -> np.ndarray | None:
        """The order to bring rows into now (int64[rows]), or None to leave them, given this step's chunks."""
        total = int(lengths.sum())
        self._wasted += sum((chunk.stop - chunk.start) * chunk.width for chunk in chunks) - total
        if self._wasted <= _COPY_COST * total:
            return None
        self._wasted = 0
        if (lengths[1:] <= lengths[:-1]).all():
            return None
        return np.argsort(-lengths, kind="stable")
