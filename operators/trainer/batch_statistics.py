"""What can be said of a global batch without training on it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from schemas.records import MicroBatch


def batch_statistics(parts: Sequence[MicroBatch]) -> dict[str, float]:
    """Means and extremes of reward, response length and staleness over `parts`, and their tokens, prompts included.

    Raises ValueError where they have no trajectory, or columns of lengths that do not agree.
    """
    rows = sum(len(part.trajectory_ids) for part in parts)
    if not rows:
        raise ValueError("it has no trajectory" if parts else "the log has lost it")
    for name in ("rewards", "lengths", "prompt_lengths", "staleness"):
        if (count := sum(len(getattr(part, name)) for part in parts)) != rows:
            raise ValueError(f"it has {rows} trajectories, but {count} {name}")
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
