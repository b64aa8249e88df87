"""The interface of a model runner: computes a step's forward passes. The engine chooses one of two implementations."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from operators.rollout.engine import KV
from operators.rollout.kv_rows import RowCopy
from operators.rollout.step_plan import Decode, Prefill


class RunnerLost(RuntimeError):
    """A runner in several processes has lost some of them: the engine needs another runner to continue."""


class Runner(Protocol):
    """Computes forward passes over the KV slots that it was built with."""

    preferred_order: np.ndarray | None
    """The row order (int64[rows]) in which the last step would run faster; None to keep the present order."""

    def prefill(self, blocks: Sequence[Prefill], layers: Collection[int] | None = None) -> None:
        """Compute and store the KV of `blocks`; with `layers`, which only some runners support, store only that of
        those layers."""

    def decode(self, step: Decode, blocks: Sequence[Prefill] = ()) -> torch.Tensor:
        """Compute `blocks` and `step`; returns the logits of its rows, [rows, vocabulary]."""


class KVStorage(Protocol):
    """The KV of the running rows, in this process (`KVSlots`) or in several."""

    def copy(self, copies: Sequence[RowCopy]) -> None:
        """Copy between rows, in order."""

    def permute(self, order: np.ndarray, width: int) -> None:
        """Reorder the first `width` positions: row i becomes the former row `order[i]`."""

    def clear(self, rows: Sequence[int]) -> None:
        """Zero `rows`."""

    def export_row(self, row: int, tokens: int) -> KV:
        """The KV of the first `tokens` tokens of `row`, for another engine."""

    def import_row(self, row: int, kv: KV, tokens: int) -> bool:
        """Store the first `tokens` tokens of `kv` in `row`; returns whether it could be used."""

    def read_row(self, row: int, tokens: int) -> dict[int, memoryview]:
        """A copy of the KV of the first `tokens` tokens of `row`, by layer; without layers that are lost."""

    def write_row(self, row: int, layout_tokens: int, tokens: int, layers: Mapping[int, memoryview]) -> set[int]:
        """Store the first `tokens` tokens of `layers`, which have `layout_tokens`; returns the layers stored."""
