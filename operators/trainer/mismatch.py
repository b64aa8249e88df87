"""How far the trainer's logprobs are from those that the rollout told, of tokens drawn under the very same weights.

At staleness 0 and before the first optimizer step both are of one policy: what differs is arithmetic or a defect.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch
from torch import Tensor

from operators.trainer.ranks import ALONE, Ranks

log = logging.getLogger(__name__)

SHARES = (0.01, 0.1, 1.0)
"""Nats above which `mismatch/share_above_<nats>` counts tokens."""


@dataclass(slots=True)
class Mismatch:
    """Sums over tokens of the sequences that are `fresh`, bool[n] of the batch's: drawn under the present weights."""

    fresh: Tensor
    sums: Tensor = field(default_factory=lambda: torch.zeros(3 + len(SHARES), dtype=torch.float64))
    """Tokens, |Δ|, k3 of Δ, and tokens with |Δ| above each of `SHARES`."""
    largest: float = 0.0

    @torch.no_grad()
    def add(self, current: Tensor, behaviour: Tensor, rows: Tensor) -> None:
        """Take in logprobs float[m], of tokens of the sequences `rows` int64[m]."""
        delta = (current - behaviour).double().cpu()[self.fresh[rows]]
        if not len(delta):
            return
        apart = delta.abs()
        counts = [(apart > share).sum().double() for share in SHARES]
        k3 = (delta.exp() - delta - 1).sum()
        self.sums = self.sums + torch.stack([torch.tensor(len(delta)).double(), apart.sum(), k3, *counts])
        self.largest = max(self.largest, float(apart.max()))

    def means(self, ranks: Ranks = ALONE) -> dict[str, float]:
        """`mismatch/...` over the tokens of all ranks, all of which must ask; empty without fresh tokens."""
        tokens, apart, k3, *counts = ranks.total(self.sums.tolist())
        largest = ranks.maximum(self.largest)
        if not tokens:
            return {}
        shares = {f"mismatch/share_above_{nats:g}": n / tokens for nats, n in zip(SHARES, counts, strict=True)}
        found = {"mismatch/abs_mean": apart / tokens, "mismatch/abs_max": largest, "mismatch/kl": k3 / tokens}
        return found | shares


class MismatchAlarm:
    """Logs a warning when `mismatch/kl` rises above `bound` nats a token, once until it has been below again."""

    def __init__(self, bound: float) -> None:
        self._bound, self._raised = bound, False

    def look(self, metrics: dict[str, float]) -> None:
        """See the metrics of an update."""
        if (found := metrics.get("mismatch/kl")) is None:
            return
        if found > self._bound and not self._raised:
            log.warning(
                "rollout and trainer disagree at staleness 0: %.2g nats a token (mismatch/kl), more than "
                "trainer.learner.mismatch_bound = %.2g. Likely causes: another dtype (rollout.dtype against "
                "trainer.learner.precision), kernels of another engine, a quantised KV cache, a sampling cut or logit "
                "bias that the logprobs do not have, weights of another version",
                found,
                self._bound,
            )
        self._raised = found > self._bound
