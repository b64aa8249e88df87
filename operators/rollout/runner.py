"""The interface of a model runner: computes a step's forward passes. The engine chooses one of two implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from operators.rollout.step_plan import Decode, Prefill


class Runner(Protocol):
    """Computes forward passes over the KV slots that it was built with."""

    preferred_order: np.ndarray | None
    """The row order (int64[rows]) in which the last step would run faster; None to keep the present order."""

    def prefill(self, blocks: Sequence[Prefill]) -> None:
        """Compute and store the KV of `blocks`."""

    def decode(self, step: Decode, blocks: Sequence[Prefill] = ()) -> torch.Tensor:
        """Compute `blocks` and `step`; returns the logits of its rows, [rows, vocabulary]."""
