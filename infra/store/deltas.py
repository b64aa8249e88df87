"""Deltas: what turns one version's bytes into the next one's, without loss, and short where little has changed.

A reinforcement-learning step at a small learning rate changes about 1 % of bfloat16 weights (PULSE, 2602.03839). The
file is cut into pieces; a piece is `same`, `sparse` (gaps between changed elements, and the XOR of each with the
parent's, by byte planes), `xor` (the XOR of all of it, by byte planes) or `raw`, compressed; which one, sizes decide
that were measured where the tensor begins. XOR makes small steps small numbers, and is its own inverse.

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
"""Share of changed elements beyond which a sparse piece is not even tried."""
_BLOCK = 32 << 10
"""Elements that are compared at a time: as many as a processor's own cache holds."""
_SAMPLE = 16 << 10
"""Bytes on which the ways are measured."""


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
        place = slice(at, min(at + _PIECE, end))
        old, new = before[place], after[place]
        way = way or _shortest_way(old, new, width)
        pieces.append(_encode_piece(old, new, width, way or "sparse"))
    return pieces


def _shortest_way(before: np.ndarray, after: np.ndarray, width: int) -> str | None:
    """The way that is measured to be the shortest at the piece's beginning; None where nothing has changed there."""
    old, new = before[:_SAMPLE], after[:_SAMPLE]
    if np.array_equal(old, new):
        return None
    found = [_encode_as(way, old, new, width) for way in ("sparse", "xor", "raw")]
    return min((piece for piece in found if piece is not None), key=_bytes_of).kind


def _encode_piece(before: np.ndarray, after: np.ndarray, width: int, way: str) -> Piece:
    """The piece in the given way; in another where that one does not fit it."""
    length = len(after)
    if way != "sparse" and np.array_equal(before, after):
        return Piece(length, width, "same", 0, 0, ())
    piece = _encode_as(way, before, after, width) or _encode_as("xor", before, after, width)
    assert piece is not None
    return piece if _bytes_of(piece) <= length else Piece(length, width, "raw", 0, 0, (_pack(after),))


def _bytes_of(piece: Piece) -> int:
    return sum(map(len, piece.parts))


def _encode_as(way: str, before: np.ndarray, after: np.ndarray, width: int) -> Piece | None:
    """The piece in one way; None where too much has changed for it. Unchanged is the shortest of the sparse ones."""
    if way == "raw":
        return Piece(len(after), width, "raw", 0, 0, (_pack(after),))
    if way == "xor":
        planes = np.bitwise_xor(before, after).reshape(-1, width).T
        return Piece(len(after), width, "xor", 0, 0, (_pack(np.ascontiguousarray(planes)),))
    index, values = _changed(before, after, width)
    if not len(index):
        return Piece(len(after), width, "same", 0, 0, ())
    if len(index) > _DENSE * len(after) / width:
        return None
    gaps = np.diff(index, prepend=-1) - 1
    gap_width = next(size for size in (1, 2, 4) if int(gaps.max()) < 1 << 8 * size)
    parts = [_pack(part) for part in (gaps.astype(_WIDTHS[gap_width]), *_planes(values))]
    return Piece(len(after), width, "sparse", len(index), gap_width, tuple(parts))


def _changed(before: np.ndarray, after: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Which elements differ, int64[changed], and their XOR."""
    old, new = before.view(_WIDTHS[width]), after.view(_WIDTHS[width])
    found, values = [], []
    for at in range(0, len(new), _BLOCK):
        mixed = np.bitwise_xor(old[at : at + _BLOCK], new[at : at + _BLOCK])
        index = np.flatnonzero(mixed != 0)
        found.append(index + at)
        values.append(mixed[index])
    return np.concatenate(found), np.concatenate(values)


def _planes(values: np.ndarray) -> list[np.ndarray]:
    """The first bytes of all `values`, the second ones, and so on: what small changes leave zero lies together."""
    return [np.ascontiguousarray(plane) for plane in values.view(np.uint8).reshape(len(values), -1).T]


def _joined(planes: Sequence[np.ndarray], kind: Any) -> np.ndarray:
    values = planes[0].astype(kind)
    for place, plane in enumerate(planes[1:], 1):
        values |= plane.astype(kind) << kind(8 * place)
    return values


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
    if kind == "sparse" and elements:
        steps = _unpack(packed[0], elements * gap_width, _WIDTHS[gap_width]).astype(np.int64)
        steps[1:] += 1
        index = np.cumsum(steps, out=steps)
        values = _joined([_unpack(part, elements, np.uint8) for part in packed[1:]], _WIDTHS[width])
        if index[-1] >= len(new) // width:
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
    if isinstance(row, list) and len(row) >= 5:
        length, width, kind, elements, gap_width, *sizes = row
        parts = {"same": 0, "raw": 1, "xor": 1, "sparse": 1 + width if width in _WIDTHS else 0}
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
