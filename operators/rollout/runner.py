"""The interface of a model runner: computes a step's forward passes. The engine chooses one of two implementations."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from operators.rollout.engine import KV
from operators.rollout.kv_rows import RowCopy
from operators.rollout.step_plan import Decode, Prefill, Verify, plan_prefill


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


class DraftRunner(Runner, Protocol):
    """A runner that can also verify drafts."""

    def verify(self, steps: Verify) -> torch.Tensor:
        """Compute `steps` in one pass; returns logits [steps × rows, vocabulary], step by step."""


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


_LENGTHS = (7, 3, 5)
_STEPS = 3


def tolerance(dtype: torch.dtype) -> float:
    """The largest accepted difference of logits, relative to the largest logit.

    Kernels that sum in another order differ by less, also in deep models; a wrong mask, position or scale by more.
    """
    return max(1e-4, 6 * torch.finfo(dtype).eps)


def max_logit_difference(runner: Runner, model: PreTrainedModel, rows: int, context: int) -> float:
    """The largest difference of logits between `runner` and `model(...)`, relative to the largest logit.

    Runs up to three random contexts of different lengths in the first KV rows: a prefill, a few decode steps, and
    another prefill in the same pass as a decode step. Uses the model's present weights; the rows' KV is not cleared.
    """
    generator = np.random.default_rng(0)
    vocabulary = model.get_input_embeddings().num_embeddings
    lengths = [length for length in _LENGTHS if length + _STEPS <= context][:rows]
    contexts = [generator.integers(0, vocabulary, length + _STEPS) for length in lengths]
    device = model.device
    with torch.inference_mode():
        plain = [model(input_ids=torch.from_numpy(context)[None].to(device)).logits[0] for context in contexts]
        worst = 0.0
        late = len(contexts) - 1 if len(contexts) > 1 else None  # joins one step after the others
        for step in range(_STEPS):
            joining = [row for row in range(len(contexts)) if (step == 1) == (row == late) and step < 2]
            running = [row for row in range(len(contexts)) if row != late or step]
            at = [lengths[row] - 1 + step for row in running]
            blocks = plan_prefill([contexts[row][: lengths[row] - 1 + step] for row in joining], joining, 1 << 20)
            token_ids = np.array([contexts[row][position] for row, position in zip(running, at, strict=True)])
            logits = runner.decode(Decode(token_ids, np.array(at)), blocks)
            for row, position, got in zip(running, at, logits, strict=True):
                expected = plain[row][position]
                worst = max(worst, float((got - expected).abs().max() / expected.abs().max()))
    return worst if np.isfinite(worst) else float("inf")
