"""Deltas: what turns one version's bytes into the next one's, without loss, and short where little has changed.

A reinforcement-learning step at a small learning rate changes about 1 % of bfloat16 weights (PULSE, 2602.03839). The
file is cut into pieces; a piece is `same`, `sparse` (gaps between changed elements, and the XOR of each with the
parent's), `xor` (the XOR of all of it, by byte planes) or `raw`, compressed; which one, sizes decide that were measured
on the tensor's first piece that changed. XOR makes small steps small numbers, and is its own inverse.

"LMND", u32 header length, JSON header [bytes, [[length, width, kind, elements, parts…]…]], the pieces' parts.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

_MAGIC = b"LMND"
_HEAD = struct.Struct("!4sI")
_PIECE = 4 << 20
_CODEC = "zstd"
_LEVEL = 1
_WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_DENSE = 0.25
"""Share of changed words beyond which a sparse piece is not even tried."""


class Piece(NamedTuple):
    """A part of the file, encoded. `parts` are its compressed bytes."""

    length: int
    width: int
    kind: str
    elements: int
    gap_width: int
    parts: tuple[bytes, ...]


Span = tuple[int, int, int]


def encode_delta(parent: memoryview, child: memoryview, spans: Sequence[Span], threads: int = 2) -> bytes:
    """What turns `parent` into `child`, files of one layout whose `spans` are `Layout.spans()`.

    Raises ValueError if their sizes differ.
    """
    if len(parent) != len(child):
        raise ValueError(f"a delta is between files of one layout, not of {len(parent)} and {len(child)} bytes")
    before, after = np.frombuffer(parent, np.uint8), np.frombuffer(child, np.uint8)
    with ThreadPoolExecutor(threads) as pool:
        pieces = [
            piece for tensor in pool.map(lambda span: _encode_span(before, after, span), spans) for piece in tensor
        ]
    rows = [
        [piece.length, piece.width, piece.kind, piece.elements, piece.gap_width, *map(len, piece.parts)]
        for piece in pieces
    ]
    header = json.dumps([len(child), rows], separators=(",", ":")).encode()
    return b"".join([_HEAD.pack(_MAGIC, len(header)), header, *(part for piece in pieces for part in piece.parts)])


def apply_delta(delta: memoryview, parent: memoryview, out: memoryview, threads: int = 2) -> None:
    """Write to `out` what `delta` makes of `parent`. Raises ValueError for a delta that is none, or of other files."""
    rows, first = _header(delta)
    if rows[0] != len(parent) or len(out) != len(parent):
        raise ValueError(f"a delta of {rows[0]!r} bytes does not fit {len(parent)}")
    before, after = np.frombuffer(parent, np.uint8), np.frombuffer(out, np.uint8)
    jobs, at, part = [], 0, first
    for row in rows[1]:
        length, width, kind, elements, gap_width, sizes = _checked(row)
        jobs.append((slice(at, at + length), width, kind, elements, gap_width, part, sizes))
        at, part = at + length, part + sum(sizes)
    if at != len(parent) or part != len(delta):
        raise ValueError(f"a delta whose pieces have {at} and {part} bytes, of {len(parent)} and {len(delta)}")
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda job: _apply_piece(delta, before, after, *job), jobs):
            pass


def _encode_span(before: np.ndarray, after: np.ndarray, span: Span) -> list[Piece]:
    start, end, width = span
    way: str | None = None
    pieces = []
    for at in range(start, end, _PIECE):
        stop = min(at + _PIECE, end)
        pieces.append(piece := _encode_piece(before[at:stop], after[at:stop], width, way))
        way = way or (None if piece.kind == "same" else piece.kind)
    return pieces


def _encode_piece(before: np.ndarray, after: np.ndarray, width: int, way: str | None) -> Piece:
    """The piece in the given way, or in the one that is measured to be the shortest."""
    length = len(after)
    changed = _changed(before, after, width) if way in (None, "sparse") else None
    if changed is not None and not len(changed[0]):
        return Piece(length, width, "same", 0, 0, ())
    if changed is None and np.array_equal(before, after):
        return Piece(length, width, "same", 0, 0, ())
    ways = ["sparse", "xor", "raw"] if way is None else [way]
    found = [made for each in ways if (made := _encode_as(each, before, after, width, changed)) is not None]
    shortest = min(found, key=lambda piece: sum(map(len, piece.parts)), default=None)
    if shortest is None or sum(map(len, shortest.parts)) > length:
        return Piece(length, width, "raw", 0, 0, (_pack(after),))
    return shortest


def _encode_as(
    way: str, before: np.ndarray, after: np.ndarray, width: int, changed: tuple[np.ndarray, np.ndarray] | None
) -> Piece | None:
    if way == "raw":
        return Piece(len(after), width, "raw", 0, 0, (_pack(after),))
    if way == "xor":
        planes = np.bitwise_xor(before, after).reshape(-1, width).T
        return Piece(len(after), width, "xor", 0, 0, (_pack(np.ascontiguousarray(planes)),))
    if changed is None or len(changed[0]) > _DENSE * len(after) / width:
        return None
    index, values = changed
    gaps = np.diff(index, prepend=-1) - 1
    gap_width = next(size for size in (1, 2, 4) if int(gaps.max()) < 1 << 8 * size)
    parts = _pack(gaps.astype(_WIDTHS[gap_width])), _pack(values)
    return Piece(len(after), width, "sparse", len(index), gap_width, parts)


def _changed(before: np.ndarray, after: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Which elements differ, int64[changed], and their XOR. Looks at eight bytes at a time first."""
    words = len(after) // 8 * 8
    mixed = np.bitwise_xor(before[:words].view(np.uint64), after[:words].view(np.uint64))
    where = np.flatnonzero(mixed)
    elements = mixed[where].view(_WIDTHS[width])
    inside = np.flatnonzero(elements)
    each = 8 // width
    index, values = where[inside // each] * each + inside % each, elements[inside]
    if words < len(after):
        tail = np.bitwise_xor(before[words:].view(_WIDTHS[width]), after[words:].view(_WIDTHS[width]))
        more = np.flatnonzero(tail)
        index, values = np.concatenate([index, more + words // width]), np.concatenate([values, tail[more]])
    return index, values


def _apply_piece(
    delta: memoryview,
    before: np.ndarray,
    after: np.ndarray,
    place: slice,
    width: int,
    kind: str,
    elements: int,
    gap_width: int,
    part: int,
    sizes: Sequence[int],
) -> None:
    old, new = before[place], after[place]
    packed, at = [], part
    for size in sizes:
        packed.append(delta[at : at + size])
        at += size
    if kind == "raw":
        np.copyto(new, _unpack(packed[0], len(new), np.uint8))
        return
    if kind == "xor":
        planes = _unpack(packed[0], len(new), np.uint8).reshape(width, -1)
        np.bitwise_xor(old, planes.T.reshape(-1), out=new)
        return
    np.copyto(new, old)
    if kind == "sparse":
        gaps = _unpack(packed[0], elements * gap_width, _WIDTHS[gap_width])
        values = _unpack(packed[1], elements * width, _WIDTHS[width])
        index = np.cumsum(gaps, dtype=np.int64) + np.arange(elements)
        if elements and index[-1] >= len(new) // width:
            raise ValueError(f"a delta that changes element {index[-1]} of {len(new) // width}")
        new.view(_WIDTHS[width])[index] ^= values


def _header(delta: memoryview) -> tuple[Any, int]:
    if len(delta) < _HEAD.size:
        raise ValueError("a delta without a head")
    magic, length = _HEAD.unpack(delta[: _HEAD.size])
    if magic != _MAGIC or _HEAD.size + length > len(delta):
        raise ValueError("not a delta")
    try:
        rows = json.loads(bytes(delta[_HEAD.size : _HEAD.size + length]))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the header of a delta cannot be read: {error}") from error
    if not (isinstance(rows, list) and len(rows) == 2 and isinstance(rows[1], list)):
        raise ValueError("the header of a delta is not one")
    return rows, _HEAD.size + length


def _checked(row: Any) -> tuple[int, int, str, int, int, list[int]]:
    parts = {"same": 0, "raw": 1, "xor": 1, "sparse": 2}
    if isinstance(row, list) and len(row) >= 5:
        length, width, kind, elements, gap_width, *sizes = row
        numbers: Iterable[Any] = (length, width, elements, gap_width, *sizes)
        if all(isinstance(n, int) and n >= 0 for n in numbers) and width in _WIDTHS and parts.get(kind) == len(sizes):
            fits = length % width == 0 and length <= _PIECE and elements <= length // width
            if fits and (kind != "sparse" or gap_width in (1, 2, 4)):
                return length, width, kind, elements, gap_width, sizes
    raise ValueError(f"a piece of a delta that cannot be: {str(row)[:100]}")


def _pack(data: np.ndarray) -> bytes:
    packed: bytes = pa.Codec(_CODEC, compression_level=_LEVEL).compress(data, asbytes=True)
    return packed


def _unpack(packed: memoryview, size: int, kind: Any) -> np.ndarray:
    if not size:
        return np.empty(0, kind)
    try:
        return np.frombuffer(pa.Codec(_CODEC).decompress(packed, decompressed_size=size), kind)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"a piece of a delta cannot be unpacked: {error}") from error
