"""Closes everything that a process holds for its shards."""

from __future__ import annotations

from operators.io.fold_records import close_folds
from operators.io.read_branches import close_branches
from operators.io.sink import close_sinks
from operators.io.source import close_sources


def close_shards() -> None:
    """Commit what has been emitted, then close folds, sources and sessions; the next run here begins a new start.

    Call it when no pipeline runs in this process. Emissions that cannot be committed in time are produced again by the
    next start.
    """
    close_branches()
    close_sinks()
    close_folds()
    close_sources()
