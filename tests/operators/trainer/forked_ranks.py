"""Ranks of a trainer as forks of one process, so that torch and transformers are imported once."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable


def fork_ranks(be: Callable[..., None], count: int, *arguments: object) -> int:
    """Call `be(rank, *arguments)` in a fork for each of `count` ranks, at once; 0 if all succeed, else 1."""
    gc.freeze()  # ranks need not visit, and copy, what is imported
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=be, args=(rank, *arguments)) for rank in range(count)]
    for each in ranks:
        each.start()
    gc.unfreeze()
    for each in ranks:
        each.join()
    return int(any(each.exitcode for each in ranks))
