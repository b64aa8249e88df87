"""Statistics of a global batch that need no training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from operators.trainer.assembly import empty_reason
from schemas.records import MicroBatch


def batch_statistics(parts: Sequence[MicroBatch]) -> dict[str, float]:
    """Statistics of reward, response length and staleness over `parts`, and their tokens, prompts included.

    Raises ValueError if the parts have no trajectory, or columns whose lengths disagree.
    """
    rows = sum(len(part.trajectory_ids) for part in parts)
    if not rows:
        raise ValueError(empty_reason(parts))
    for name in ("rewards", "lengths", "prompt_lengths", "staleness"):
        if (count := sum(len(getattr(part, name)) for part in parts)) != rows:
            raise ValueError(f"the batch has {rows} trajectories, but {count} {name}")
    rewards = np.concatenate([part.rewards.to_numpy() for part in parts])
    lengths = np.concatenate([part.lengths.to_numpy() - part.prompt_lengths.to_numpy() for part in parts])
    staleness = np.concatenate([part.staleness.to_numpy() for part in parts])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "staleness/mean": float(staleness.mean()),
        "staleness/max": float(staleness.max()),
        "tokens": float(sum(len(part.token_ids) for part in parts)),
    }
