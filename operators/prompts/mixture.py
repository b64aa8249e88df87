"""Which task each prompt is of: a function of the seed, the prompt's number and the tasks that have questions left."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from itertools import accumulate


def draw_task(seed: int, number: int, weights: Sequence[float]) -> int | None:
    """The index of the task of prompt `number`, as often as its share of `weights`; None where all weigh 0.

    Drawn, not dealt out in turn: partitions take prompts by number in turn, and would each have one task alone.
    """
    ends = list(accumulate(weights))
    if not ends or not ends[-1]:
        return None
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    at = int.from_bytes(digest, "big") / 2**64 * ends[-1]
    return min(bisect.bisect_right(ends, at), max(index for index, weight in enumerate(weights) if weight))
