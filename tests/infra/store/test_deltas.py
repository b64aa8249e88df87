"""Deltas: lossless for any change, small for small changes, and errors for invalid deltas."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.store import deltas
from infra.store.deltas import apply_delta, encode_delta

SPANS = [(0, 40, 1), (40, 40 + 2 * 5003, 2), (10046, 10046 + 4 * 1001, 4), (14050, 14050 + 8 * 17, 8)]
SIZE = SPANS[-1][1]


def parent_file(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)


def applied(delta: bytes, parent: np.ndarray) -> np.ndarray:
    out = np.zeros_like(parent)
    apply_delta(memoryview(delta), memoryview(parent), memoryview(out))
    return out


@given(st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(1, 255)), max_size=200), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_delta_restores_any_change(changes: list[tuple[int, int]], threads: int) -> None:
    parent = parent_file()
    child = parent.copy()
    for place, flip in changes:
        child[place] ^= flip
    delta = encode_delta(memoryview(parent), memoryview(child), SPANS, threads)
    assert np.array_equal(applied(delta, parent), child)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.3, 1.0])
def test_delta_uses_the_smaller_form(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "_PIECE", 4096)
    parent, random = parent_file(), np.random.default_rng(1)
    child = parent.copy()
    chosen = random.random(5003) < share
    child[40:10046].view(np.uint16)[chosen] ^= 1
    delta = encode_delta(memoryview(parent), memoryview(child), SPANS)
    assert np.array_equal(applied(delta, parent), child)
    assert len(delta) < 600 + 4 * chosen.sum() + (2000 if share > 0.1 else 0)


@pytest.mark.parametrize("last", [1, 1 << 8, (1 << 8) + 1, 1 << 16, (1 << 16) + 1, 299_999])
def test_delta_encodes_far_steps(last: int) -> None:
    parent = np.zeros(300_000, np.uint8)
    child = parent.copy()
    child[[0, last]] = 7
    delta = encode_delta(memoryview(parent), memoryview(child), [(0, len(parent), 1)])
    assert np.array_equal(applied(delta, parent), child)
    assert len(delta) < 120


@pytest.mark.parametrize(("new", "pieces"), [([], 1), ([1], 3)])
def test_delta_groups_neighbours_unless_one_changes_entirely(new: list[int], pieces: int) -> None:
    spans = [(0, 4000, 2), (4000, 8000, 2), (8000, 20_000, 2)]
    parent = np.random.default_rng(0).integers(0, 256, 20_000, np.uint8)
    child = parent.copy()
    child[::500] ^= 1
    for start, end, _ in (spans[place] for place in new):
        child[start:end] = np.random.default_rng(1).integers(0, 256, end - start, np.uint8)
    delta = memoryview(encode_delta(memoryview(parent), memoryview(child), spans))
    assert np.array_equal(applied(bytes(delta), parent), child)
    assert len(deltas._header(delta)[0][1]) == pieces


def test_delta_of_random_bytes_is_hardly_larger_than_the_file() -> None:
    parent, child = parent_file(0), parent_file(1)
    delta = encode_delta(memoryview(parent), memoryview(child), SPANS)
    assert np.array_equal(applied(delta, parent), child)
    assert len(delta) < SIZE * 1.05 + 500


def test_encode_delta_raises_for_files_of_different_sizes() -> None:
    with pytest.raises(ValueError, match="not of 3 and 4 bytes"):
        encode_delta(memoryview(b"abc"), memoryview(b"abcd"), [])


def forged(rows: Any, parts: bytes = b"") -> bytes:
    header = json.dumps([SIZE, rows]).encode()
    return struct.pack("!4sI", b"LMD4", len(header)) + header + parts


@pytest.mark.parametrize(
    ("delta", "message"),
    [
        (b"", "has no header"),
        (b"LMNX" + b"\0" * 20, "not a delta"),
        (b"LMD4\xff\xff\xff\xff", "not a delta"),
        (struct.pack("!4sI", b"LMD4", 3) + b"[1,", "cannot be decoded"),
        (struct.pack("!4sI", b"LMD4", 2) + b"{}", "must be"),
        (struct.pack("!4sI", b"LMD4", 6) + b"[5,[]]", "is for files of 5 bytes"),
        (forged([]), "pieces of the delta have 0 and"),
        (forged([[SIZE, 1, "same", 0, 0, 0]], b"more"), "pieces of the delta have"),
        (forged([[SIZE + 1, 1, "same", 0, 0, 0]]), "pieces of the delta have"),
        (forged([[1 << 40, 1, "same", 0, 0, 0]]), "an invalid piece"),
        (forged([[-1, 1, "same", 0, 0, 0]]), "an invalid piece"),
        (forged([[SIZE, 3, "same", 0, 0, 0]]), "an invalid piece"),
        (forged([[SIZE, 1, "else", 0, 0, 0]]), "an invalid piece"),
        (forged([[SIZE, 1, "sparse", SIZE + 1, 1, 0]]), "an invalid piece"),
        (forged([[SIZE, 1, "sparse", 2, 3, 0]]), "an invalid piece"),
        (forged([[SIZE, [], "sparse", 2, 1, 0]]), "an invalid piece"),
        (forged([[SIZE, 1, "raw", 0, 0, 4]], b"junk"), "cannot be decompressed"),
        (forged([[SIZE, 1, "sparse", 2, 2, 24]], b"x" * 24), "cannot be decompressed"),
    ],
)
def test_apply_delta_raises_for_an_invalid_delta(delta: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        applied(delta, parent_file())


@pytest.mark.parametrize(
    ("steps", "far", "beyond", "message"),
    [
        ([0, 5], [], [], "changes elements -1 to 4"),
        ([5, 1], [1], [(SIZE >> 8) + 1], "changes elements 4 to"),
        ([5, 1], [0, 1], [0xFFFF_FFFF] * 2, "changes elements"),
        ([5, 1], [2], [0], "a far step at 2 of 2"),
    ],
)
def test_apply_delta_raises_for_elements_out_of_range(
    steps: list[int], far: list[int], beyond: list[int], message: str
) -> None:
    """The first step starts before the first element."""
    numbers, planes = np.array([far, beyond], np.uint32), np.array([steps, [1, 1]], np.uint8)
    packed = deltas._pack(np.frombuffer(numbers.tobytes() + planes.tobytes(), np.uint8))
    with pytest.raises(ValueError, match=message):
        applied(forged([[SIZE, 1, "sparse", 2, len(far), len(packed)]], packed), parent_file())


def test_delta_of_small_changes_is_small_across_carries() -> None:
    """0x00FF to 0x0100 is the next number although many bits differ."""
    parent = np.full(20_000, 0x00FF, np.uint16)
    up, down = parent.copy(), parent.copy()
    up[::5] += 1
    down[::5] -= 1
    lengths = []
    for child in (up, down):
        delta = encode_delta(*(memoryview(each.view(np.uint8)) for each in (parent, child)), [(0, 40_000, 2)])
        assert np.array_equal(applied(delta, parent.view(np.uint8)), child.view(np.uint8))
        lengths.append(len(delta))
    assert max(lengths) <= min(lengths) + 8
