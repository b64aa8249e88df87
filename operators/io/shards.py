"""What a process holds for its shards, let go of as one."""

from __future__ import annotations

from operators.io.fold_records import close_folds
from operators.io.read_topics import close_sources
from operators.io.sink import close_sinks


def close_shards() -> None:
    """Commit what has been emitted, then close memories, sessions and sources: the next run here begins a new start.

    Call when no pipeline runs in this process. What cannot be committed in time the next start makes again.
    """
    close_sinks()
    close_folds()
    close_sources()
