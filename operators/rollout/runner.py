"""What takes a step's tokens through a model; two implementations, chosen by the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from operators.rollout.step_plan import Decode, Prefill


class Runner(Protocol):
    """Takes tokens through a model, over the KV slots it was built with."""

    preferred_order: np.ndarray | None
    """The order (int64[rows]) in which the last step's rows would run faster, None if they do well as they are."""

    def prefill(self, blocks: Sequence[Prefill]) -> None:
        """Compute and store the KV of `blocks`."""

    def decode(self, step: Decode, blocks: Sequence[Prefill] = ()) -> torch.Tensor:
        """Compute `blocks` and `step`; returns the logits of its rows, [rows, vocabulary]."""
