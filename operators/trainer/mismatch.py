"""Mismatch between the trainer's and the rollout's logprobs of tokens sampled under the same weights.

Before the first optimizer step of a batch both are logprobs of one policy: a difference is arithmetic or a defect.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from infra.models.device_copies import on_device
from operators.trainer.ranks import ALONE, Ranks
from schemas.records import PolicyVersion

log = logging.getLogger(__name__)

SHARES = (0.01, 0.1, 1.0)
"""Nats above which `mismatch/share_above_<nats>` counts tokens."""


def current_versions(versions: Iterable[PolicyVersion], batch: int) -> Tensor:
    """Which of `versions` are the weights that batch number `batch` changes, bool[n].

    Version n has taken the batches 0 to n - 1. A batch's staleness does not tell: it is from the time when the batch
    was made, and the trainer may have taken others since. Versions of other runs (imported, epoch 0) never are.
    """
    current = [version.epoch > 0 and version.number == batch for version in versions]
    return torch.tensor(current, dtype=torch.bool)  # also of a rank without rows


@dataclass(slots=True)
class Mismatch:
    """Sums over tokens of `fresh` sequences, bool[n] over the batch: those sampled under the current weights."""

    fresh: Tensor
    sums: Tensor | None = None
    """Token count, sum of |Δ|, sum of k3 of Δ, and token counts with |Δ| above each of `SHARES`; on the device."""
    largest: Tensor | None = None

    @torch.no_grad()
    def add(self, current: Tensor, behaviour: Tensor, rows: Tensor) -> None:
        """Add logprobs float[m] of tokens that belong to the sequences `rows` int64[m]."""
        fresh = self.fresh[rows]
        if not fresh.any():
            return
        fresh = on_device(fresh, current.device)
        delta = torch.where(fresh, (current - behaviour).double(), 0.0)
        absolute = delta.abs()
        values = (fresh, absolute, delta.exp() - delta - 1, *(absolute > share for share in SHARES))
        sums, largest = torch.stack([value.sum(dtype=torch.float64) for value in values]), absolute.max()
        self.sums = sums if self.sums is None else self.sums + sums
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)

    def means(self, ranks: Ranks = ALONE) -> dict[str, float]:
        """`mismatch/...` over the tokens of all ranks; empty without fresh tokens. A collective."""
        own = [0.0] * (3 + len(SHARES)) if self.sums is None else self.sums.tolist()
        tokens, absolute, k3, *counts = ranks.total(own)
        largest = ranks.maximum(0.0 if self.largest is None else float(self.largest))
        if not tokens:
            return {}
        shares = {f"mismatch/share_above_{nats:g}": n / tokens for nats, n in zip(SHARES, counts, strict=True)}
        result = {"mismatch/abs_mean": absolute / tokens, "mismatch/abs_max": largest, "mismatch/kl": k3 / tokens}
        return result | shares


class MismatchAlarm:
    """Logs a warning when `mismatch/kl` rises above `bound` nats per token; again only after it was below."""

    def __init__(self, bound: float) -> None:
        self._bound, self._raised = bound, False

    def check(self, metrics: dict[str, float]) -> None:
        """Check the metrics of an update, and add `mismatch/above_bound`, 1 or 0."""
        if (result := metrics.get("mismatch/kl")) is None:
            return
        above = not result <= self._bound  # NaN, too
        if above and not self._raised:
            log.warning(
                "rollout and trainer logprobs of the same weights differ: %.2g nats per token (mismatch/kl), above "
                "trainer.learner.mismatch_bound = %.2g. Likely causes: different dtypes (rollout.dtype and "
                "trainer.learner.precision), different kernels, a quantised KV cache, top-p/top-k sampling or a logit "
                "bias that the logprobs do not include, weights of another version",
                result,
                self._bound,
            )
        self._raised = above
        metrics["mismatch/above_bound"] = float(above)
