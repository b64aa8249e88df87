"""Settings of Python's cyclic garbage collector for pipelines."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (50_000, 20, 50)
"""Allocations between two collections of generation 0, and collections between those of generations 1 and 2."""


def collect_rarely() -> None:
    """Run the collector less often. Call it before the imports, which free nothing: those of a zygote took 7.7 s with
    Python's thresholds, and take 7.1 s.
    """
    gc.set_threshold(*THRESHOLDS)


def skip_collections_of_exit() -> None:
    """Let the exit of this process not search for cycles, which takes a tenth of a second after our imports."""
    atexit.register(gc.freeze)


def reduce_gc_frequency() -> None:
    """Run the collector less often, and exclude all objects that exist now.

    A pipeline holds tens of thousands of records, hardly any of them in a cycle. By default the collector scans them
    repeatedly, which took a tenth of placement's CPU time with 256 replicas. Imported modules are never freed anyway.
    """
    gc.collect()
    gc.freeze()
    collect_rarely()


@contextmanager
def without_collections() -> Iterator[None]:
    """Within this context the collector does not run: for work of bounded length that makes hardly any cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
