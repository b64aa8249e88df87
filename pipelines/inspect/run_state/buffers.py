"""Merges the metrics of the experience shards into those of one buffer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain

from schemas.metric_labels import (
    COMPONENT_MEAN,
    COMPONENT_TRAJECTORIES,
    DROPPED_SINCE_BATCH,
    LATER_PARTS,
    SHARD,
    SHARDS,
    TASK,
    TEXT,
    split_labels,
)

_WEIGHTS = {
    **dict.fromkeys(("reward/mean", "response_length/mean", "accuracy/mean"), "trajectories"),
    COMPONENT_MEAN: COMPONENT_TRAJECTORIES,
}
"""Means by task or reward component: the value with the same labels that counts the trajectories of each."""
_LAYOUT = (SHARD, SHARDS, LATER_PARTS)
_EQUAL = ("batches", "curriculum/", "dropped_share/")
"""Values that are about equal in all shards, which have every n-th prompt: averaged."""

LEVEL = "curriculum/level"

Values = Mapping[str, float]


def merge_shards(shards: Sequence[Values]) -> dict[str, float]:
    """The merged values: means weighted by trajectories, equal values averaged, all others added."""
    if len(shards) == 1:
        return {key: value for key, value in shards[0].items() if key not in _LAYOUT}
    merged: dict[str, float] = {}
    for key in dict.fromkeys(chain.from_iterable(shards)):
        name, labels = split_labels(key)
        counted = _WEIGHTS.get(name) if labels else None
        values = [
            (each[key], 1.0 if counted is None else _value(each, counted, labels)) for each in shards if key in each
        ]
        total = sum(value * weight for value, weight in values)
        shared = counted is not None or name.startswith(_EQUAL)
        merged[key] = total / (sum(weight for _, weight in values) or 1.0) if shared else total
    return {key: value for key, value in merged.items() if key not in _LAYOUT}


def with_metric(shards: Mapping[int, Values], values: Values) -> dict[int, Values]:
    """The metrics of a buffer's `shards`, by number, with the newest one: shards that no longer exist are left out."""
    present = {**shards, int(values.get(SHARD, 0)): values}
    return {number: each for number, each in present.items() if number < values.get(SHARDS, math.inf)}


def curriculum_levels(values: Values) -> dict[str, int]:
    """The level of each curriculum in a metric of the buffer, by task; the only one has the name "". Counted from 0."""
    found = (split_labels(key) for key in values)
    return {labels.get(TASK, ""): round(_value(values, name, labels)) for name, labels in found if name == LEVEL}


def levels_text(levels: Mapping[str, int | str]) -> str:
    """`1`, or with several curricula `sums 1, gcd 0`."""
    return ", ".join(f"{task} {level}".strip() for task, level in levels.items())


def dropped_since_batch(values: Values) -> tuple[int, str]:
    """The trajectories dropped since the last batch, and the newest reason; 0 while batches are filled."""
    found = [
        (value, labels)
        for key, value in values.items()
        for name, labels in [split_labels(key)]
        if name == DROPPED_SINCE_BATCH
    ]
    return int(sum(value for value, _ in found)), found[-1][1].get(TEXT, "") if found else ""


def _value(values: Values, name: str, labels: Mapping[str, str]) -> float:
    return next((value for key, value in values.items() if split_labels(key) == (name, labels)), 0.0)
