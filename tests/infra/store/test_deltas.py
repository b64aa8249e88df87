"""Deltas: whatever changed, the bytes come back; little changed is short; and a bad delta is an error."""

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
def test_any_change_comes_back(changes: list[tuple[int, int]], threads: int) -> None:
    parent = parent_file()
    child = parent.copy()
    for place, flip in changes:
        child[place] ^= flip
    delta = encode_delta(memoryview(parent), memoryview(child), SPANS, threads)
    assert np.array_equal(applied(delta, parent), child)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.3, 1.0])
def test_the_shorter_way_is_taken(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "_PIECE", 4096)
    parent, random = parent_file(), np.random.default_rng(1)
    child = parent.copy()
    chosen = random.random(5003) < share
    child[40:10046].view(np.uint16)[chosen] ^= 1
    delta = encode_delta(memoryview(parent), memoryview(child), SPANS)
    assert np.array_equal(applied(delta, parent), child)
    assert len(delta) < 600 + 4 * chosen.sum() + (2000 if share > 0.1 else 0)


@pytest.mark.parametrize("last", [1, 1 << 8, (1 << 8) + 1, 1 << 16, (1 << 16) + 1, 299_999])
def test_what_changed_may_be_far_apart(last: int) -> None:
    parent = np.zeros(300_000, np.uint8)
    child = parent.copy()
    child[[0, last]] = 7
    delta = encode_delta(memoryview(parent), memoryview(child), [(0, len(parent), 1)])
    assert np.array_equal(applied(delta, parent), child)
    assert len(delta) < 120


@pytest.mark.parametrize(("new", "pieces"), [([], 1), ([1], 3)])
def test_neighbours_share_a_piece_unless_one_of_them_is_new_throughout(new: list[int], pieces: int) -> None:
    spans = [(0, 4000, 2), (4000, 8000, 2), (8000, 20_000, 2)]
    parent = np.random.default_rng(0).integers(0, 256, 20_000, np.uint8)
    child = parent.copy()
    child[::500] ^= 1
    for start, end, _ in (spans[place] for place in new):
        child[start:end] = np.random.default_rng(1).integers(0, 256, end - start, np.uint8)
    delta = memoryview(encode_delta(memoryview(parent), memoryview(child), spans))
    assert np.array_equal(applied(bytes(delta), parent), child)
    assert len(deltas._header(delta)[0][1]) == pieces


def test_new_bytes_throughout_cost_little_more_than_themselves() -> None:
    parent, child = parent_file(0), parent_file(1)
    delta = encode_delta(memoryview(parent), memoryview(child), SPANS)
    assert np.array_equal(applied(delta, parent), child)
    assert len(delta) < SIZE * 1.05 + 500


def test_files_of_two_layouts_have_no_delta() -> None:
    with pytest.raises(ValueError, match="not of 3 and 4 bytes"):
        encode_delta(memoryview(b"abc"), memoryview(b"abcd"), [])


def forged(rows: Any, parts: bytes = b"") -> bytes:
    header = json.dumps([SIZE, rows]).encode()
    return struct.pack("!4sI", b"LMD4", len(header)) + header + parts


@pytest.mark.parametrize(
    ("delta", "message"),
    [
        (b"", "without a head"),
        (b"LMNX" + b"\0" * 20, "not a delta"),
        (b"LMD4\xff\xff\xff\xff", "not a delta"),
        (struct.pack("!4sI", b"LMD4", 3) + b"[1,", "cannot be read"),
        (struct.pack("!4sI", b"LMD4", 2) + b"{}", "is not one"),
        (struct.pack("!4sI", b"LMD4", 6) + b"[5,[]]", "a delta of 5 bytes does not fit"),
        (forged([]), "pieces have 0 and"),
        (forged([[SIZE, 1, "same", 0, 0, 0]], b"more"), "pieces have"),
        (forged([[SIZE + 1, 1, "same", 0, 0, 0]]), "pieces have"),
        (forged([[1 << 40, 1, "same", 0, 0, 0]]), "a piece of a delta that cannot be"),
        (forged([[-1, 1, "same", 0, 0, 0]]), "a piece of a delta that cannot be"),
        (forged([[SIZE, 3, "same", 0, 0, 0]]), "a piece of a delta that cannot be"),
        (forged([[SIZE, 1, "else", 0, 0, 0]]), "a piece of a delta that cannot be"),
        (forged([[SIZE, 1, "sparse", SIZE + 1, 1, 0]]), "a piece of a delta that cannot be"),
        (forged([[SIZE, 1, "sparse", 2, 3, 0]]), "a piece of a delta that cannot be"),
        (forged([[SIZE, [], "sparse", 2, 1, 0]]), "a piece of a delta that cannot be"),
        (forged([[SIZE, 1, "raw", 0, 0, 4]], b"junk"), "cannot be unpacked"),
        (forged([[SIZE, 1, "sparse", 2, 2, 24]], b"x" * 24), "cannot be unpacked"),
    ],
)
def test_a_delta_that_cannot_be_is_an_error(delta: bytes, message: str) -> None:
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
def test_an_element_that_is_not_there_is_an_error(
    steps: list[int], far: list[int], beyond: list[int], message: str
) -> None:
    """The first step is counted from before the beginning."""
    numbers, planes = np.array([far, beyond], np.uint32), np.array([steps, [1, 1]], np.uint8)
    packed = deltas._pack(np.frombuffer(numbers.tobytes() + planes.tobytes(), np.uint8))
    with pytest.raises(ValueError, match=message):
        applied(forged([[SIZE, 1, "sparse", 2, len(far), len(packed)]], packed), parent_file())


def test_a_small_change_is_short_whatever_bits_carry() -> None:
    """From 0x00FF to 0x0100 is a step to the next number, in every bit of it another one."""
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
