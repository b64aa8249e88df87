"""The speed of a run's engines, from its metrics: seconds in which they had requests, beside steps and tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from schemas.records import Metric

ROLLOUT = "rollout"
SECONDS, STEPS, TOKENS = "rollout/busy_seconds", "rollout/steps", "rollout/tokens"
ALIKE = 0.2
"""Batches whose deviation is a smaller share of their mean are too alike to show how a step grows with them."""


class EngineInterval(NamedTuple):
    """What the engines of one process did between two of its metrics."""

    seconds: float
    steps: float
    tokens: float


def decode_line(intervals: Sequence[EngineInterval]) -> tuple[tuple[int, float], ...]:
    """Batch sizes and milliseconds from one engine step to the next, as a line: two rows of a roofline.

    Prefills, sampling, and what a process does between two steps, as the steps of its other replicas, are part of them.
    """
    seconds, steps, tokens = np.array(intervals).T
    batches, times = tokens / steps, seconds / steps
    batch, time = float(np.average(batches, weights=steps)), float(np.average(times, weights=steps))
    variance = float(np.average((batches - batch) ** 2, weights=steps))
    slope = 0.0
    if variance > (ALIKE * batch) ** 2:
        slope = float(np.average((batches - batch) * (times - time), weights=steps)) / variance
    slope = min(max(0.0, slope), time / batch)
    most = max(2, round(float(batches.max())))
    return tuple((size, max(1000 * (time + slope * (size - batch)), 1e-3)) for size in (1, most))


def engine_intervals(metrics: Sequence[Metric]) -> Iterator[EngineInterval]:
    """The intervals in which engines stepped, between two metrics of a rollout process, of one start each."""
    processes = defaultdict[int, list[list[float]]](list)
    for each in metrics:
        if each.name == ROLLOUT and SECONDS in each.values:
            processes[each.step].append([each.values[name] for name in (SECONDS, STEPS, TOKENS)])
    for sums in processes.values():
        for first, second in pairwise(sums):
            interval = EngineInterval(*(after - before for before, after in zip(first, second, strict=True)))
            if interval.steps > 0 <= min(interval):  # a restarted process counts from 0
                yield interval
