"""Metrics of an update, under the names that are common among RL trainers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from operators.trainer.global_batch_metadata import GlobalBatchMetadata
from operators.trainer.losses import PolicyLogprobs, TokenLosses, importance_ratios
from operators.trainer.ranks import ALONE, Ranks


def batch_metrics(metadata: GlobalBatchMetadata, advantages: Tensor) -> dict[str, float]:
    """Metrics of a batch that need no forward pass.

    `frac_reward_zero_std` is the share of groups whose rewards are all equal, those of conversations included,
    `response_length/clip_ratio` the share of responses that a length limit cut off.
    """
    lengths = metadata.lengths - metadata.prompt_lengths
    groups = metadata.groups[metadata.sequences]
    by_group = [metadata.context_rewards[groups == group] for group in range(int(groups.max()) + 1)]
    return {
        "reward/mean": float(metadata.rewards.mean()),
        "reward/std": float(metadata.rewards.std()),
        "frac_reward_zero_std": float(np.mean([np.ptp(rewards) == 0 for rewards in by_group])),
        "advantage/abs_mean": float(advantages.abs().mean()) if len(advantages) else 0.0,
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/clip_ratio": float(metadata.truncated.mean()),
        "staleness/mean": float(metadata.staleness.mean()),
        "staleness/max": float(metadata.staleness.max()),
        "batch/trajectories": float(len(metadata)),
        "batch/tokens": float(metadata.lengths.sum()),
        "batch/trained_tokens": float(metadata.trained.sum()),
    }


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """The finite ones of `values`: no record holds others. `skipped_updates` counts the steps that have them."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


_TOKEN_NAMES = (
    "importance_ratio/mean",
    "_ratio_squares",
    "kl/mismatch",
    "clip_ratio/low",
    "clip_ratio/high",
    "correction/weight_mean",
    "entropy",
    "kl/ref",
)


@dataclass(slots=True)
class TokenMetrics:
    """Sums over the tokens with a forward pass; rows that the update skips are not included.

    The sums stay on the device until `means` is called, so the host waits for the device once per update.
    """

    tokens: int = 0
    sums: Tensor | None = None
    """float64, in the order of `_TOKEN_NAMES`."""
    largest_ratio: Tensor | None = None
    recorded: dict[str, float] = field(default_factory=dict)
    has_kl_penalty: bool = False
    """Whether the loss has a KL penalty."""
    clip_can_bind: bool = True
    """Whether the clip can bind; without it `clip_ratio/low` and `high` are omitted."""

    def record(self, name: str, values: Tensor) -> None:
        """Record the mean of `values`, whose tokens differ from those of `add`."""
        if len(values):
            self.recorded[name] = float(values.double().mean())

    def add(
        self,
        policy: PolicyLogprobs,
        losses: TokenLosses,
        weights: Tensor,
        entropies: Tensor,
        kl: Tensor | None,
    ) -> None:
        """Add one micro-batch; all tensors are float[m]."""
        if not len(weights):
            return
        with torch.no_grad():
            ratio = importance_ratios(policy.current, policy.behaviour)
            values = (
                ratio,
                ratio**2,
                ratio - (policy.current - policy.behaviour) - 1,
                losses.below,
                losses.above,
                weights,
                entropies,
                ratio.new_zeros(1) if kl is None else kl,
            )
            sums, largest = torch.stack([value.sum(dtype=torch.float64) for value in values]), ratio.max()
            self.sums = sums if self.sums is None else self.sums + sums
            self.largest_ratio = largest if self.largest_ratio is None else torch.maximum(self.largest_ratio, largest)
            self.tokens += len(ratio)

    def means(self, ranks: Ranks = ALONE) -> dict[str, float]:
        """Means over the tokens of all ranks; `ess` is (Σw)²/(n·Σw²) of w = π/μ, 1 for on-policy data.

        Without tokens only the values of `record`. A collective: every rank must call it.
        """
        own = [0.0] * len(_TOKEN_NAMES) if self.sums is None else self.sums.tolist()
        tokens, *sums = ranks.total([self.tokens, *own])
        largest = ranks.maximum(0.0 if self.largest_ratio is None else float(self.largest_ratio))
        if not tokens:
            return dict(self.recorded)
        means = {name: value / tokens for name, value in zip(_TOKEN_NAMES, sums, strict=True)}
        squares = means.pop("_ratio_squares")
        means["ess"] = means["importance_ratio/mean"] ** 2 / squares
        means["importance_ratio/max"] = largest
        if not self.has_kl_penalty:
            del means["kl/ref"]
        if not self.clip_can_bind:
            del means["clip_ratio/low"], means["clip_ratio/high"]
        return means | self.recorded
