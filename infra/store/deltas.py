"""Deltas: what turns one version's bytes into the next one's, without loss, and short where little has changed.

A reinforcement-learning step at a small learning rate changes a few per cent of bfloat16 weights. The file is cut into
pieces of one tensor each; a piece is `same`, `sparse` (gaps between changed elements, and the XOR of each with the
parent's), `xor` (the XOR of all of it) or `raw`: what is measured to be the shortest. XOR makes small steps small
numbers, and is its own inverse. Numbers are cut into byte planes, all first bytes together, and compressed.

"LMD2", u32 header length, JSON header [bytes, [[length, width, kind, elements, gap width, packed bytes]…]], the pieces.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

_MAGIC = b"LMD2"
_HEAD = struct.Struct("!4sI")
_PIECE = 4 << 20
_CODEC = "zstd"
_LEVEL = 1
_KINDS = ("same", "sparse", "xor", "raw")
_WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_DENSE = 0.25
"""Share of changed elements beyond which a sparse piece is not even tried."""
_SHORT = 0.125
"""Share of its bytes at which a sparse piece is short enough, whatever the other ways would take."""
_SAMPLE = 16 << 10
"""Bytes at a piece's beginning that stand for it where looking at all of it would take too long."""
_THREADS = min(4, os.cpu_count() or 1)


class Piece(NamedTuple):
    """A part of the file, encoded: `elements` of it change, and their gaps take `gap_width` bytes each."""

    length: int
    width: int
    kind: str
    elements: int
    gap_width: int
    packed: bytes | memoryview


Span = tuple[int, int, int]


def encode_delta(parent: memoryview, child: memoryview, spans: Sequence[Span], threads: int = _THREADS) -> bytes:
    """What turns `parent` into `child`, files of one layout whose `spans` are `Layout.spans()`.

    Raises ValueError if their sizes differ.
    """
    if len(parent) != len(child):
        raise ValueError(f"a delta is between files of one layout, not of {len(parent)} and {len(child)} bytes")
    before, after = np.frombuffer(parent, np.uint8), np.frombuffer(child, np.uint8)

    jobs = [
        (slice(at, min(at + _PIECE, end)), width) for start, end, width in spans for at in range(start, end, _PIECE)
    ]
    with ThreadPoolExecutor(threads) as pool:
        pieces = list(pool.map(lambda job: _encode_piece(before[job[0]], after[job[0]], job[1]), jobs))
    rows = [[*piece[:-1], len(piece.packed)] for piece in pieces]
    header = json.dumps([len(child), rows], separators=(",", ":")).encode()
    return b"".join([_HEAD.pack(_MAGIC, len(header)), header, *(piece.packed for piece in pieces)])


def apply_delta(delta: memoryview, parent: memoryview, out: memoryview, threads: int = _THREADS) -> None:
    """Write to `out` what `delta` makes of `parent`. Raises ValueError for a delta that is none, or of other files."""
    rows, first = _header(delta)
    if rows[0] != len(parent) or len(out) != len(parent):
        raise ValueError(f"a delta of {rows[0]!r} bytes does not fit {len(parent)}")
    before, after = np.frombuffer(parent, np.uint8), np.frombuffer(out, np.uint8)
    jobs, at, packed = [], 0, first
    for row in rows[1]:
        length, width, kind, elements, gap_width, size = _checked(row)
        piece = Piece(length, width, kind, elements, gap_width, delta[packed : packed + size])
        jobs.append((piece, before[at : at + length], after[at : at + length]))
        at, packed = at + length, packed + size
    if at != len(parent) or packed != len(delta):
        raise ValueError(f"a delta whose pieces have {at} and {packed} bytes, of {len(parent)} and {len(delta)}")
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda job: _apply_piece(*job), jobs):
            pass


def _encode_piece(before: np.ndarray, after: np.ndarray, width: int) -> Piece:
    """The piece in the shortest way; where the sparse one is short, the others are not tried."""
    sparse = _sparse(before, after, width)
    if sparse is not None and len(sparse.packed) <= _SHORT * len(after):
        return sparse
    begins = [_dense(kind, before[:_SAMPLE], after[:_SAMPLE], width) for kind in ("xor", "raw")]
    dense = _dense(min(begins, key=_size).kind, before, after, width)
    return dense if sparse is None else min(sparse, dense, key=_size)


def _size(piece: Piece) -> int:
    return len(piece.packed)


def _dense(kind: str, before: np.ndarray, after: np.ndarray, width: int) -> Piece:
    """The piece as all of its bytes, or as the XOR of all of it."""
    planes = np.bitwise_xor(before, after).reshape(-1, width).T if kind == "xor" else after
    return Piece(len(after), width, kind, 0, 0, _pack(np.ascontiguousarray(planes)))


def _sparse(before: np.ndarray, after: np.ndarray, width: int) -> Piece | None:
    """The piece as what changes in it, `same` where nothing does; None where too much does."""
    old, new = before.view(_WIDTHS[width]), after.view(_WIDTHS[width])
    begin = slice(0, _SAMPLE // width)
    if np.count_nonzero(old[begin] != new[begin]) > _DENSE * len(new[begin]):
        return None
    index, values = _changed(before, after, width)
    if not len(index):
        return Piece(len(after), width, "same", 0, 0, b"")
    if len(index) > _DENSE * len(new):
        return None
    gaps = np.diff(index, prepend=-1) - 1
    gap_width = next(size for size in (1, 2, 4) if int(gaps.max()) < 1 << 8 * size)
    packed = _pack(np.concatenate([*_planes(gaps, gap_width), *_planes(values, width)]))
    return Piece(len(after), width, "sparse", len(index), gap_width, packed)


def _changed(before: np.ndarray, after: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Which elements differ, int64[changed], and their XOR.

    Whole words are compared, and elements only in those that differ, which are few.
    """
    kind, shift = _WIDTHS[width], (8 // width).bit_length() - 1
    end = len(after) // 8 * 8
    old, new = before[:end].view(np.uint64), after[:end].view(np.uint64)
    (words,) = (old != new).nonzero()
    mixed = (old.take(words) ^ new.take(words)).view(kind)
    (inside,) = (mixed != 0).nonzero()
    index = (words.take(inside >> shift) << shift) + (inside & (1 << shift) - 1)
    rest = before[end:].view(kind) ^ after[end:].view(kind)
    (last,) = rest.nonzero()
    if not len(last):
        return index, mixed.take(inside)
    return np.concatenate([index, last + end // width]), np.concatenate([mixed.take(inside), rest[last]])


def _planes(values: np.ndarray, width: int) -> list[np.ndarray]:
    """The first bytes of all `values`, the second ones, and so on: what small changes leave zero lies together."""
    return [(values >> values.dtype.type(8 * byte)).astype(np.uint8) for byte in range(width)]


def _joined(planes: np.ndarray, kind: Any) -> np.ndarray:
    values = planes[0].astype(kind)
    for place, plane in enumerate(planes[1:], 1):
        values |= plane.astype(kind) << kind(8 * place)
    return values


def _apply_piece(piece: Piece, old: np.ndarray, new: np.ndarray) -> None:
    if piece.kind == "raw":
        np.copyto(new, _unpack(piece.packed, len(new)))
        return
    if piece.kind == "xor":
        planes = _unpack(piece.packed, len(new)).reshape(piece.width, -1)
        np.bitwise_xor(old, planes.T.reshape(-1), out=new)
        return
    np.copyto(new, old)
    if piece.kind == "sparse" and piece.elements:
        planes = _unpack(piece.packed, piece.elements * (piece.gap_width + piece.width)).reshape(-1, piece.elements)
        steps = _joined(planes[: piece.gap_width], _WIDTHS[piece.gap_width]).astype(np.int64)
        steps[1:] += 1
        index = np.cumsum(steps, out=steps)
        elements = new.view(_WIDTHS[piece.width])
        if index[-1] >= len(elements):
            raise ValueError(f"a delta that changes element {index[-1]} of {len(elements)}")
        elements[index] = elements.take(index) ^ _joined(planes[piece.gap_width :], elements.dtype.type)


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


def _checked(row: Any) -> tuple[int, int, str, int, int, int]:
    if isinstance(row, list) and len(row) == 6:
        length, width, kind, elements, gap_width, size = row
        numbers = (length, width, elements, gap_width, size)
        if all(isinstance(n, int) and n >= 0 for n in numbers) and width in _WIDTHS and kind in _KINDS:
            fits = length % width == 0 and length <= _PIECE and elements <= length // width
            if fits and (gap_width in (1, 2, 4) or not elements):
                return length, width, kind, elements, gap_width, size
    raise ValueError(f"a piece of a delta that cannot be: {str(row)[:100]}")


def _pack(data: np.ndarray) -> bytes:
    packed: bytes = pa.Codec(_CODEC, compression_level=_LEVEL).compress(data, asbytes=True)
    return packed


def _unpack(packed: bytes | memoryview, size: int) -> np.ndarray:
    try:
        return np.frombuffer(pa.Codec(_CODEC).decompress(packed, decompressed_size=size), np.uint8)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"a piece of a delta cannot be unpacked: {error}") from error
