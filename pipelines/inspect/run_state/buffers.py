"""Merges the metrics of the experience shards into those of one buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

SHARD = "shard"
"""The metric value with the shard's number, if there are several shards."""
_MEANS = ("reward/mean/", "response_length/mean/", "accuracy/mean/")
"""Means by task over its trajectories: weighted by trajectories."""
_EQUAL = ("curriculum/", "dropped_share/")
"""Values that are about equal in all shards, which have every n-th prompt: averaged."""

Values = Mapping[str, float]


def merge_shards(shards: Sequence[Values]) -> dict[str, float]:
    """The merged values: means weighted by trajectories, equal values averaged, all others added."""
    if len(shards) == 1:
        return dict(shards[0])
    merged: dict[str, float] = {}
    for key in dict.fromkeys(chain.from_iterable(shards)):
        values = [(each[key], _weight(key, each)) for each in shards if key in each]
        total = sum(value * weight for value, weight in values)
        shared = key.startswith(_MEANS + _EQUAL)
        merged[key] = total / (sum(weight for _, weight in values) or 1.0) if shared else total
    merged.pop(SHARD, None)
    return merged


def _weight(key: str, values: Values) -> float:
    task = next((key.removeprefix(mean) for mean in _MEANS if key.startswith(mean)), None)
    return 1.0 if task is None else values.get(f"trajectories/{task}", 0.0)
