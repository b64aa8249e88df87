"""Splits the rows of a decode step into chunks, so that short rows do not attend over the padding of long ones.

Attention over a chunk costs its rows times its longest row; each further chunk costs a few kernel calls. Rows are
ordered by age, not by length, so they are sorted from time to time: when the padding since the last sort has cost more
than copying the rows will (the ski-rental rule).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_CALL_COST = 45_000
"""Cost of one more chunk per layer, in multiply-adds: three kernel calls, about 12 µs on one CPU core."""

_COPY_COST = 6
"""Cost of copying one token's KV, in tokens attended over."""


@dataclass(frozen=True, slots=True)
class AttentionChunk:
    """Rows `start`..`stop`-1; the longest has `width` tokens, and all of them if `uniform`."""

    start: int
    stop: int
    width: int
    uniform: bool


def split_rows(lengths: np.ndarray, query_size: int, most: int = 4) -> list[AttentionChunk]:
    """At most `most` chunks of rows with `lengths` (int64[rows]); each split saves more than it costs.

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
    """A chunk, its best split, and the row-tokens that the split saves."""

    chunk: AttentionChunk
    split: int
    saving: int


def _best_split(lengths: np.ndarray, start: int, stop: int, least: int) -> _ChunkSplit:
    part = lengths[start:stop]
    rows, longest = stop - start, int(part.max())
    padding = rows * longest - int(part.sum())
    chunk = AttentionChunk(start, stop, longest, padding == 0)
    if padding <= least:  # a split saves at most all the padding; most steps return here
        return _ChunkSplit(chunk, start, 0)
    before = np.maximum.accumulate(part)[:-1]
    after = np.maximum.accumulate(part[::-1])[-2::-1]
    counts = np.arange(1, rows)
    cost = counts * before + (rows - counts) * after
    best = int(cost.argmin())
    return _ChunkSplit(chunk, start + best + 1, rows * longest - int(cost[best]))


class RowOrder:
    """Decides when to sort rows by length, longest first."""

    def __init__(self) -> None:
        self._padding_cost = 0

    def order_if_due(self, lengths: np.ndarray, chunks: list[AttentionChunk]) -> np.ndarray | None:
        """The order (int64[rows]) to sort the rows into now, given this step's chunks; None to leave them."""
        total = int(lengths.sum())
        self._padding_cost += sum((chunk.stop - chunk.start) * chunk.width for chunk in chunks) - total
        if self._padding_cost <= _COPY_COST * total:
            return None
        self._padding_cost = 0
        if (lengths[1:] <= lengths[:-1]).all():
            return None
        return np.argsort(-lengths, kind="stable")
