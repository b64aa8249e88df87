"""Python's cycle collector, told what a pipeline's memory is like."""

from __future__ import annotations

import gc

THRESHOLDS = (50_000, 20, 50)
"""Allocations between two collections of the young, and how many of those between two of the older ones."""


def reduce_gc_frequency() -> None:
    """Look for cycles less often, and never among what is there by now.

    A pipeline holds records by the ten thousand, hardly any of them in a cycle, and by default they are gone through
    time and again: a tenth of placement's CPU time with 256 replicas. What has been imported stays to the end anyway.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
