"""Weight stores that benchmarks publish to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infra.store.ownership import remove_store
from infra.store.publisher import Publisher
from infra.store.weight_store import WeightStore
from schemas.records import PolicyVersion


@contextmanager
def temporary_store(root: Path, keep: int = 2) -> Iterator[WeightStore]:
    """A store in `root`, which is removed at the end."""
    with WeightStore(root, keep=keep) as store:
        try:
            yield store
        finally:
            store.close()
            remove_store(store.root, in_use=True)


def publish(publisher: Publisher, weights: Any, version: PolicyVersion) -> None:
    """Publish `weights` as `version`, that of as many steps, batches and trajectories as its number."""
    number = version.number
    publisher.publish(
        weights, version, step=number, batches=[number], batch_offsets=[number], trajectories_trained=number
    )
