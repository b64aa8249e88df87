"""Deltas: what turns one version's bytes into the next one's, without loss, and short where little has changed.

A reinforcement-learning step at a small learning rate changes a few per cent of bfloat16 weights. The file is cut into
pieces of one tensor each; a piece is `same`, `sparse` (steps from one changed element to the next, and the XOR of each
with the parent's), `xor` (the XOR of all of it) or `raw`: what is measured to be the shortest. XOR makes small changes
small numbers, and is its own inverse. Numbers are cut into byte planes, all first bytes together, and compressed.

"LMD3", u32 header length, JSON header [bytes, [[length, width, kind, elements, step width, packed bytes]…]], pieces.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

_MAGIC = b"LMD3"
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


Result = TypeVar("Result")


class Piece(NamedTuple):
    """A part of the file, encoded: `elements` of it change, and their steps take `step_width` bytes each."""

    length: int
    width: int
    kind: str
    elements: int
    step_width: int
    packed: bytes | memoryview


Span = tuple[int, int, int]


def encode_delta(parent: memoryview, child: memoryview, spans: Sequence[Span], threads: int = _THREADS) -> bytes:
    """What turns `parent` into `child`, files of one layout whose `spans` are `Layout.spans()`.

    Raises ValueError if their sizes differ.
    """
    if len(parent) != len(child):
        raise ValueError(f"a delta is between files of one layout, not of {len(parent)} and {len(child)} bytes")
    before, after = np.frombuffer(parent, np.uint8), np.frombuffer(child, np.uint8)

    cuts = [
        (slice(at, min(at + _PIECE, end)), width) for start, end, width in spans for at in range(start, end, _PIECE)
    ]
    pieces = _each(_encode_piece, [(before[cut], after[cut], width) for cut, width in cuts], threads)
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
        length, width, kind, elements, step_width, size = _checked(row)
        piece = Piece(length, width, kind, elements, step_width, delta[packed : packed + size])
        jobs.append((piece, before[at : at + length], after[at : at + length]))
        at, packed = at + length, packed + size
    if at != len(parent) or packed != len(delta):
        raise ValueError(f"a delta whose pieces have {at} and {packed} bytes, of {len(parent)} and {len(delta)}")
    _each(_apply_piece, jobs, threads)


def _each(work: Callable[..., Result], jobs: Sequence[tuple[Any, ...]], threads: int) -> list[Result]:
    """What `work` makes of each job, in order. A future a job would take as long as many a small tensor."""
    done: dict[int, Result] = {}
    left = iter(range(len(jobs)))

    def take(_: int) -> None:
        for place in left:  # shared: whoever is free takes the next
            done[place] = work(*jobs[place])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(take, range(threads)))  # raises what a job has raised
    return [done[place] for place in range(len(jobs))]


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
    index = _changed(old, new)
    if not len(index):
        return Piece(len(after), width, "same", 0, 0, b"")
    if len(index) > _DENSE * len(new):
        return None
    steps = np.diff(index, prepend=-1).astype(np.uint32)
    step_width = next(size for size in (1, 2, 4) if int(steps.max()) < 1 << 8 * size)
    values = old.take(index) ^ new.take(index)
    packed = _pack(np.concatenate([*_planes(steps, step_width), *_planes(values, width)]))
    return Piece(len(after), width, "sparse", len(index), step_width, packed)


def _changed(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Which elements differ: int64[changed].

    First it is found in which eights of them something does, then which of these do: numpy takes as long for an element
    that is rare as for a dozen others, and of such eights an eighth or more differ.
    """
    differs = np.empty(-(-len(new) // 8) * 8, bool)
    differs[len(new) :] = False
    np.not_equal(old, new, out=differs[: len(new)])
    eights = differs.view(np.uint64)
    (some,) = (eights != 0).nonzero()
    (index,) = eights.take(some).view(bool).nonzero()
    skipped = (some - np.arange(len(some))) << 3
    index += skipped.take(index >> 3)
    return index


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
        planes = _unpack(piece.packed, piece.elements * (piece.step_width + piece.width)).reshape(-1, piece.elements)
        elements = new.view(_WIDTHS[piece.width])
        steps = _joined(planes[: piece.step_width], np.int64)
        steps[0] -= 1
        index = np.cumsum(steps, out=steps)
        if not 0 <= index[0] <= index[-1] < len(elements):
            raise ValueError(f"a delta that changes elements {index[0]} to {index[-1]} of {len(elements)}")
        elements[index] = elements.take(index) ^ _joined(planes[piece.step_width :], elements.dtype.type)


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
        length, width, kind, elements, step_width, size = row
        numbers = (length, width, elements, step_width, size)
        if all(isinstance(n, int) and n >= 0 for n in numbers) and width in _WIDTHS and kind in _KINDS:
            fits = length % width == 0 and length <= _PIECE and elements <= length // width
            if fits and (step_width in (1, 2, 4) or not elements):
                return length, width, kind, elements, step_width, size
    raise ValueError(f"a piece of a delta that cannot be: {str(row)[:100]}")


def _pack(data: np.ndarray) -> bytes:
    packed: bytes = pa.Codec(_CODEC, compression_level=_LEVEL).compress(data, asbytes=True)
    return packed


def _unpack(packed: bytes | memoryview, size: int) -> np.ndarray:
    try:
        return np.frombuffer(pa.Codec(_CODEC).decompress(packed, decompressed_size=size), np.uint8)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"a piece of a delta cannot be unpacked: {error}") from error
