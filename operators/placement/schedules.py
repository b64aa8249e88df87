"""Schedules: the settings of published systems for the same three rules.

They set how much may be outstanding, when replicas load newer weights, and whether trajectories move to free replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Schedule = Literal["laminar", "synchronous", "one_step", "stream", "partial_rollout"]
Refresh = Literal["drain", "boundary", "interrupt"]


@dataclass(frozen=True)
class Rules:
    """How generation and weight updates are coordinated.

    `admitted_batches` bounds the outstanding work in global batches; None: max_staleness + 1. `refresh` sets when a
    replica loads newer weights: `drain` when its own batch has drained, `boundary` when all replicas have generated a
    round of `round_batches` global batches, `interrupt` at once, within trajectories.
    """

    admitted_batches: int | None
    refresh: Refresh
    repack: bool
    round_batches: int = 1


SCHEDULES: Mapping[Schedule, Rules] = {
    "laminar": Rules(None, "drain", repack=True),
    # verl: generate a batch, train it, repeat.
    "synchronous": Rules(1, "boundary", repack=False),
    # Batch n is generated while batch n - 1 is trained.
    "one_step": Rules(2, "boundary", repack=False),
    # StreamRL: the trainer starts with early finishers; weights are synchronised once a round.
    "stream": Rules(2, "boundary", repack=False, round_batches=2),
    # AReaL: newer weights interrupt running trajectories, which continue under them.
    "partial_rollout": Rules(None, "interrupt", repack=False),
}
