"""Deltas: what turns one version's bytes into the next one's, without loss, and short where little has changed.

A reinforcement-learning step at a small learning rate changes a few per cent of bfloat16 weights. The file is cut into
pieces: neighbouring tensors are one where that is short, else each is its own. A piece is `same`, `sparse` (steps from
one changed element to the next, and by how much each has changed), `xor` (the XOR of all of it) or `raw`: what is
measured to be the shortest. A change is the difference of the elements' bits as whole numbers, zigzagged: to the next
number up is 2, down 1, whatever bits carry. A step is a byte; of the few `far` ones, their places and what is beyond
the byte come first. Numbers are cut into byte planes, all first bytes together, and compressed.

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
import pyarrow as pa

_MAGIC = b"LMD4"
_HEAD = struct.Struct("!4sI")
_PIECE = 8 << 20
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
_STEP = 255
_THREADS = min(4, os.cpu_count() or 1)


_scratch = threading.local()

Result = TypeVar("Result")


class Piece(NamedTuple):
    """A part of the file, encoded: `elements` of it change, `far` of them beyond a byte's step from the one before."""

    length: int
    width: int
    kind: str
    elements: int
    far: int
    packed: bytes | memoryview


Span = tuple[int, int, int]


def encode_delta(parent: memoryview, child: memoryview, spans: Sequence[Span], threads: int = _THREADS) -> bytes:
    """What turns `parent` into `child`, files of one layout whose `spans` are `Layout.spans()`.

    Raises ValueError if their sizes differ.
    """
    if len(parent) != len(child):
        raise ValueError(f"a delta is between files of one layout, not of {len(parent)} and {len(child)} bytes")
    before, after = np.frombuffer(parent, np.uint8), np.frombuffer(child, np.uint8)

    encoded = _each(_encode_run, [(before, after, run, width) for width, run in _runs(spans)], threads)
    pieces = [piece for run in encoded for piece in run]
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
        length, width, kind, elements, far, size = _checked(row)
        piece = Piece(length, width, kind, elements, far, delta[packed : packed + size])
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


def _runs(spans: Sequence[Span]) -> list[tuple[int, list[slice]]]:
    """Element width and places of neighbours, as many as make a piece; what is longer than a piece is cut."""
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
    """Neighbours are one piece if it is short: threads wait for one another between numpy's steps, so few are best."""
    if len(run) > 1:
        whole = slice(run[0].start, run[-1].stop)
        piece = _sparse(before[whole], after[whole], width)
        if piece is not None and len(piece.packed) <= _SHORT * (whole.stop - whole.start):
            return [piece]
    return [_encode_piece(before[cut], after[cut], width) for cut in run]


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
    steps = np.ediff1d(index, to_begin=index[0] + 1)  # the first one from before the first element
    (far,) = (steps > _STEP).nonzero()
    changes = new[index]  # quicker than take
    changes -= old[index]
    parts = np.empty(8 * len(far) + (1 + width) * len(index), np.uint8)
    beyond, planes = _parts(parts, len(index), len(far))
    beyond[0], beyond[1] = far, steps[far] >> 8
    np.copyto(planes[0], steps, casting="unsafe")  # its lowest byte
    _cut(_zigzag(changes), planes[1:])
    return Piece(len(after), width, "sparse", len(index), len(far), _pack(parts))


def _parts(parts: np.ndarray, elements: int, far: int) -> tuple[np.ndarray, np.ndarray]:
    """Of a sparse piece: uint32[2, far], which steps go beyond a byte and by how much, and its uint8[.., elements]."""
    return parts[: 8 * far].view(np.uint32).reshape(2, far), parts[8 * far :].reshape(-1, elements)


def _changed(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Which elements differ: int64[changed].

    First it is found in which eights of them something does, then which of these do: numpy takes as long for an element
    that is rare as for a dozen others, and of such eights an eighth or more differ.
    """
    differs = _flags(-(-len(new) // 8) * 8)
    differs[len(new) :] = False
    np.not_equal(old, new, out=differs[: len(new)])
    eights = differs.view(np.uint64)
    (some,) = (eights != 0).nonzero()
    (index,) = eights.take(some).view(bool).nonzero()
    some -= np.arange(len(some))
    some <<= 3
    index += some.take(index >> 3, mode="clip")
    return index


def _flags(count: int) -> np.ndarray:
    """bool[count] of this thread's own, used again and again: new memory costs more than what is written to it."""
    flags: np.ndarray | None = getattr(_scratch, "flags", None)
    if flags is None or len(flags) < count:
        flags = _scratch.flags = np.empty(_PIECE, bool)
    return flags[:count]


def _zigzag(changes: np.ndarray) -> np.ndarray:
    """Small numbers for small changes either way: twice each, less one for those below zero."""
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


def _cut(values: np.ndarray, planes: np.ndarray) -> None:
    """The first bytes of all `values`, the second ones, and so on: what small changes leave zero lies together."""
    for byte, plane in enumerate(planes):
        np.right_shift(values, values.dtype.type(8 * byte), out=plane, casting="unsafe")


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
        parts = _unpack(piece.packed, 8 * piece.far + (1 + piece.width) * piece.elements)
        (far, beyond), planes = _parts(parts, piece.elements, piece.far)
        steps = planes[0].astype(np.int64)
        if piece.far and far.max() >= piece.elements:
            raise ValueError(f"a delta with a far step at {far.max()} of {piece.elements}")
        steps[far] += beyond.astype(np.int64) << 8
        steps[0] -= 1
        index = np.cumsum(steps, out=steps)
        elements = new.view(_WIDTHS[piece.width])
        if not 0 <= index[0] <= index[-1] < len(elements):
            raise ValueError(f"a delta that changes elements {index[0]} to {index[-1]} of {len(elements)}")
        elements[index] += _unzigzag(_joined(planes[1:], elements.dtype.type))


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
        length, width, kind, elements, far, size = row
        numbers = (length, width, elements, far, size)
        if all(isinstance(n, int) and n >= 0 for n in numbers) and width in _WIDTHS and kind in _KINDS:
            fits = length % width == 0 and length <= _PIECE
            if fits and far <= elements <= length // width:
                return length, width, kind, elements, far, size
    raise ValueError(f"a piece of a delta that cannot be: {str(row)[:100]}")


def _pack(data: np.ndarray) -> bytes:
    packed: bytes = pa.Codec(_CODEC, compression_level=_LEVEL).compress(data, asbytes=True)
    return packed


def _unpack(packed: bytes | memoryview, size: int) -> np.ndarray:
    try:
        return np.frombuffer(pa.Codec(_CODEC).decompress(packed, decompressed_size=size), np.uint8)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"a piece of a delta cannot be unpacked: {error}") from error
