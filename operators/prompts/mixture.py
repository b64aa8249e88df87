"""Mixtures: the task of a prompt is a function of the seed, its number and the tasks that have questions left."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from itertools import accumulate


def draw_task(seed: int, number: int, weights: Sequence[float]) -> int | None:
    """The index of the task of prompt `number`, drawn by its share of `weights`; None if all weights are 0.

    Tasks are drawn, not assigned round-robin: prompts are assigned to partitions round-robin, so each partition could
    have a single task.
    """
    ends = list(accumulate(weights))
    if not ends or not ends[-1]:
        return None
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    at = int.from_bytes(digest, "big") / 2**64 * ends[-1]
    return min(bisect.bisect_right(ends, at), max(index for index, weight in enumerate(weights) if weight))
