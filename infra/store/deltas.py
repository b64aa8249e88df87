"""Deltas: lossless differences between the bytes of one version and the next, small if few weights have changed.

A reinforcement-learning step at a small learning rate changes a few per cent of bfloat16 weights. The file is split
into pieces: neighbouring tensors share a piece if that is small, otherwise each has its own. A piece is `same`,
`sparse` (the steps between changed elements, and the changes), `xor` (the XOR of all bytes) or `raw`: the smallest
form, by measurement. A change is the difference of the elements' bits as integers, zigzag-encoded: the next larger
number is 2, the next smaller 1, whatever bits carry. A step is one byte; the positions of the few `far` steps and
their high bytes come first. Numbers are split into byte planes, all first bytes together, and compressed.

"LMD4", u32 header length, JSON header [bytes, [[length, width, kind, elements, far, packed bytes]…]], pieces.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np

_MAGIC = b"LMD4"
_HEAD = struct.Struct("!4sI")
_PIECE = 8 << 20
_CODEC = "zstd"
_LEVEL = 1
_KINDS = ("same", "sparse", "xor", "raw")
_WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_MAX_CHANGED = 0.25
"""Share of changed elements above which `sparse` is not tried."""
_SHORT_ENOUGH = 0.125
"""Share of its bytes below which a sparse piece is used without trying the other forms."""
_SAMPLE_BYTES = 16 << 10
"""Bytes at the start of a piece that are used as a sample of it."""
_MAX_STEP = 255
_THREADS = min(4, os.cpu_count() or 1)


_thread_local = threading.local()

Result = TypeVar("Result")


class Piece(NamedTuple):
    """An encoded part of the file: `elements` change, `far` of them by a step larger than a byte."""

    length: int
    width: int
    kind: str
    elements: int
    far: int
    packed: bytes | memoryview


Span = tuple[int, int, int]


def encode_delta(parent: memoryview, child: memoryview, spans: Sequence[Span], threads: int = _THREADS) -> bytes:
    """Encode the delta from `parent` to `child`, files of one layout with `spans` from `Layout.spans()`.

    Raises ValueError if their sizes differ.
    """
    if len(parent) != len(child):
        raise ValueError(f"a delta requires files of one layout, not of {len(parent)} and {len(child)} bytes")
    before, after = np.frombuffer(parent, np.uint8), np.frombuffer(child, np.uint8)

    encoded = _map_in_threads(_encode_run, [(before, after, run, width) for width, run in _group_spans(spans)], threads)
    pieces = [piece for run in encoded for piece in run]
    rows = [[*piece[:-1], len(piece.packed)] for piece in pieces]
    header = json.dumps([len(child), rows], separators=(",", ":")).encode()
    return b"".join([_HEAD.pack(_MAGIC, len(header)), header, *(piece.packed for piece in pieces)])


def apply_delta(delta: memoryview, parent: memoryview, out: memoryview, threads: int = _THREADS) -> None:
    """Apply `delta` to `parent` and write the result to `out`. Raises ValueError for an invalid or unrelated delta."""
    rows, first = _header(delta)
    if rows[0] != len(parent) or len(out) != len(parent):
        raise ValueError(f"the delta is for files of {rows[0]!r} bytes, the parent has {len(parent)}")
    before, after = np.frombuffer(parent, np.uint8), np.frombuffer(out, np.uint8)
    jobs, at, packed = [], 0, first
    for row in rows[1]:
        length, width, kind, elements, far, size = _check_row(row)
        piece = Piece(length, width, kind, elements, far, delta[packed : packed + size])
        jobs.append((piece, before[at : at + length], after[at : at + length]))
        at, packed = at + length, packed + size
    if at != len(parent) or packed != len(delta):
        raise ValueError(
            f"the pieces of the delta have {at} and {packed} bytes, expected {len(parent)} and {len(delta)}"
        )
    _map_in_threads(_apply_piece, jobs, threads)


def _map_in_threads(work: Callable[..., Result], jobs: Sequence[tuple[Any, ...]], threads: int) -> list[Result]:
    """The results of `work` for each job, in order. One future per job would cost as much as a small tensor."""
    done: dict[int, Result] = {}
    left = iter(range(len(jobs)))

    def take(_: int) -> None:
        for place in left:  # shared: a free thread takes the next job
            done[place] = work(*jobs[place])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(take, range(threads)))  # re-raises errors of jobs
    return [done[place] for place in range(len(jobs))]


def _group_spans(spans: Sequence[Span]) -> list[tuple[int, list[slice]]]:
    """Groups of neighbouring slices of one element width that fit into a piece; longer spans are split."""
    runs: list[tuple[int, list[slice]]] = []
    for start, end, width in spans:
        for at in range(start, end, _PIECE):
            cut = slice(at, min(at + _PIECE, end))
            if runs and runs[-1][0] == width and cut.stop - runs[-1][1][0].start <= _PIECE:
                runs[-1][1].append(cut)
            else:
                runs.append((width, [cut]))
    return runs


def _encode_run(before: np.ndarray, after: np.ndarray, run: list[slice], width: int) -> list[Piece]:
    """Encode neighbours as one piece if it is small: fewer pieces mean less waiting for the GIL between numpy calls."""
    if len(run) > 1:
        whole = slice(run[0].start, run[-1].stop)
        piece = _encode_sparse(before[whole], after[whole], width)
        if piece is not None and len(piece.packed) <= _SHORT_ENOUGH * (whole.stop - whole.start):
            return [piece]
    return [_encode_piece(before[cut], after[cut], width) for cut in run]


def _encode_piece(before: np.ndarray, after: np.ndarray, width: int) -> Piece:
    """Encode a piece in its smallest form; if `sparse` is small enough, the other forms are not tried."""
    sparse = _encode_sparse(before, after, width)
    if sparse is not None and len(sparse.packed) <= _SHORT_ENOUGH * len(after):
        return sparse
    samples = [_encode_dense(kind, before[:_SAMPLE_BYTES], after[:_SAMPLE_BYTES], width) for kind in ("xor", "raw")]
    dense = _encode_dense(min(samples, key=_size).kind, before, after, width)
    return dense if sparse is None else min(sparse, dense, key=_size)


def _size(piece: Piece) -> int:
    return len(piece.packed)


def _encode_dense(kind: str, before: np.ndarray, after: np.ndarray, width: int) -> Piece:
    """Encode a piece as `raw` or `xor`."""
    planes = np.bitwise_xor(before, after).reshape(-1, width).T if kind == "xor" else after
    return Piece(len(after), width, kind, 0, 0, _pack(np.ascontiguousarray(planes)))


def _encode_sparse(before: np.ndarray, after: np.ndarray, width: int) -> Piece | None:
    """Encode a piece as `sparse`, or `same` without changes; None if too many elements change."""
    old, new = before.view(_WIDTHS[width]), after.view(_WIDTHS[width])
    sample = slice(0, _SAMPLE_BYTES // width)
    if np.count_nonzero(old[sample] != new[sample]) > _MAX_CHANGED * len(new[sample]):
        return None
    index = _changed_elements(old, new)
    if not len(index):
        return Piece(len(after), width, "same", 0, 0, b"")
    if len(index) > _MAX_CHANGED * len(new):
        return None
    steps = np.ediff1d(index, to_begin=index[0] + 1)  # the first step starts before the first element
    (far,) = (steps > _MAX_STEP).nonzero()
    changes = new[index]  # faster than take
    changes -= old[index]
    parts = np.empty(8 * len(far) + (1 + width) * len(index), np.uint8)
    beyond, planes = _split_parts(parts, len(index), len(far))
    beyond[0], beyond[1] = far, steps[far] >> 8
    np.copyto(planes[0], steps, casting="unsafe")  # the low byte
    _split_planes(_zigzag(changes), planes[1:])
    return Piece(len(after), width, "sparse", len(index), len(far), _pack(parts))


def _split_parts(parts: np.ndarray, elements: int, far: int) -> tuple[np.ndarray, np.ndarray]:
    """The parts of a sparse piece: uint32[2, far], far steps and their high bytes, and planes uint8[.., elements]."""
    return parts[: 8 * far].view(np.uint32).reshape(2, far), parts[8 * far :].reshape(-1, elements)


def _changed_elements(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """The indexes of the elements that differ: int64[changed].

    Groups of eight elements with a difference are found first, then the elements within them: numpy takes as long for
    a rare element as for a dozen others, and in such groups at least an eighth differ.
    """
    differs = _flag_array(-(-len(new) // 8) * 8)
    differs[len(new) :] = False
    np.not_equal(old, new, out=differs[: len(new)])
    groups = differs.view(np.uint64)
    (changed_groups,) = (groups != 0).nonzero()
    (index,) = groups.take(changed_groups).view(bool).nonzero()
    changed_groups -= np.arange(len(changed_groups))
    changed_groups <<= 3
    index += changed_groups.take(index >> 3, mode="clip")
    return index


def _flag_array(count: int) -> np.ndarray:
    """A reused bool[count] of this thread: allocating memory costs more than writing to it."""
    flags: np.ndarray | None = getattr(_thread_local, "flags", None)
    if flags is None or len(flags) < count:
        flags = _thread_local.flags = np.empty(_PIECE, bool)
    return flags[:count]


def _zigzag(changes: np.ndarray) -> np.ndarray:
    """Zigzag encoding: 2n for n ≥ 0 and −2n − 1 for n < 0."""
    kind = changes.dtype.type
    below = kind(0) - (changes >> kind(8 * kind().itemsize - 1))
    changes <<= kind(1)
    changes ^= below
    return changes


def _unzigzag(numbers: np.ndarray) -> np.ndarray:
    kind = numbers.dtype.type
    below = kind(0) - (numbers & kind(1))
    numbers >>= kind(1)
    numbers ^= below
    return numbers


def _split_planes(values: np.ndarray, planes: np.ndarray) -> None:
    """Write the first bytes of all `values`, then the second ones, and so on, so that zero bytes are adjacent."""
    for byte, plane in enumerate(planes):
        np.right_shift(values, values.dtype.type(8 * byte), out=plane, casting="unsafe")


def _join_planes(planes: np.ndarray, kind: Any) -> np.ndarray:
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
        parts = _unpack(piece.packed, 8 * piece.far + (1 + piece.width) * piece.elements)
        (far, beyond), planes = _split_parts(parts, piece.elements, piece.far)
        steps = planes[0].astype(np.int64)
        if piece.far and far.max() >= piece.elements:
            raise ValueError(f"the delta has a far step at {far.max()} of {piece.elements} elements")
        steps[far] += beyond.astype(np.int64) << 8
        steps[0] -= 1
        index = np.cumsum(steps, out=steps)
        elements = new.view(_WIDTHS[piece.width])
        if not 0 <= index[0] <= index[-1] < len(elements):
            raise ValueError(f"the delta changes elements {index[0]} to {index[-1]} of {len(elements)}")
        elements[index] += _unzigzag(_join_planes(planes[1:], elements.dtype.type))


def _header(delta: memoryview) -> tuple[Any, int]:
    if len(delta) < _HEAD.size:
        raise ValueError("the delta has no header")
    magic, length = _HEAD.unpack(delta[: _HEAD.size])
    if magic != _MAGIC or _HEAD.size + length > len(delta):
        raise ValueError("not a delta: wrong magic or header length")
    try:
        rows = json.loads(bytes(delta[_HEAD.size : _HEAD.size + length]))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the header of the delta cannot be decoded: {error}") from error
    if not (isinstance(rows, list) and len(rows) == 2 and isinstance(rows[1], list)):
        raise ValueError("the header of the delta must be [bytes, pieces]")
    return rows, _HEAD.size + length


def _check_row(row: Any) -> tuple[int, int, str, int, int, int]:
    if isinstance(row, list) and len(row) == 6:
        length, width, kind, elements, far, size = row
        numbers = (length, width, elements, far, size)
        if all(isinstance(n, int) and n >= 0 for n in numbers) and width in _WIDTHS and kind in _KINDS:
            fits = length % width == 0 and length <= _PIECE
            if fits and far <= elements <= length // width:
                return length, width, kind, elements, far, size
    raise ValueError(f"the delta has an invalid piece: {str(row)[:100]}")


def _pack(data: np.ndarray) -> bytes:
    import pyarrow as pa  # on first use: readers of full versions need no codec

    packed: bytes = pa.Codec(_CODEC, compression_level=_LEVEL).compress(data, asbytes=True)
    return packed


def _unpack(packed: bytes | memoryview, size: int) -> np.ndarray:
    import pyarrow as pa

    try:
        return np.frombuffer(pa.Codec(_CODEC).decompress(packed, decompressed_size=size), np.uint8)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"a piece of the delta cannot be decompressed: {error}") from error
