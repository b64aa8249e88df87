"""What the shards of the buffer tell of one batch, or of themselves, as if there were one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

SHARD = "shard"
"""A value that says which shard told, where there are several."""
_MEANS = ("reward/mean/", "response_length/mean/", "accuracy/mean/")
"""Of a task, over its trajectories."""
_ALIKE = ("curriculum/", "dropped_share/")
"""About the same in all shards, which have every n-th prompt."""

Values = Mapping[str, float]


def merge_shards(told: Sequence[Values]) -> dict[str, float]:
    """The values of all shards: means by trajectories, what is alike as its mean, and all else added up."""
    if len(told) == 1:
        return dict(told[0])
    found: dict[str, float] = {}
    for key in dict.fromkeys(chain.from_iterable(told)):
        values = [(each[key], _weight(key, each)) for each in told if key in each]
        total = sum(value * weight for value, weight in values)
        shared = key.startswith(_MEANS + _ALIKE)
        found[key] = total / (sum(weight for _, weight in values) or 1.0) if shared else total
    found.pop(SHARD, None)
    return found


def _weight(key: str, values: Values) -> float:
    task = next((key.removeprefix(mean) for mean in _MEANS if key.startswith(mean)), None)
    return 1.0 if task is None else values.get(f"trajectories/{task}", 0.0)
