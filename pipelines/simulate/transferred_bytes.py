"""The bytes of simulated weights and KV: functions of what they belong to, so that every copy can be checked."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from blake3 import blake3

from infra.store.layout import Layout
from schemas.records import PolicyVersion, TensorSpec

_SHARED, _CHANGED = 20_000, 4_000
"""Bytes that all versions share, and bytes that differ: a delta is worth it."""
SPECS = (TensorSpec("changed", "U8", (_CHANGED,)), TensorSpec("shared", "U8", (_SHARED,)))
KV_BYTES = 48
"""Bytes of KV for one token."""


def tensors_of(content: str) -> Mapping[str, np.ndarray]:
    """The tensors, uint8, of a version with this content."""
    return {"changed": _bytes(f"weights {content}", _CHANGED), "shared": _bytes("weights", _SHARED)}


@lru_cache(maxsize=256)
def file_of(content: str) -> bytes:
    """The whole file of a version with this content."""
    layout = Layout(SPECS)
    data = bytearray(layout.size)
    data[: len(layout.header)] = layout.header
    for name, view in layout.tensor_views(memoryview(data)).items():
        view[:] = tensors_of(content)[name]
    return bytes(data)


def kv_of(trajectory_id: str, version: PolicyVersion, tokens: int) -> bytes:
    """The KV of the first `tokens` tokens of a trajectory under a version."""
    return blake3(f"KV {trajectory_id} {version} {tokens}".encode()).digest(tokens * KV_BYTES)


@lru_cache(maxsize=256)
def _bytes(text: str, count: int) -> np.ndarray:
    return np.frombuffer(blake3(text.encode()).digest(count), np.uint8)
