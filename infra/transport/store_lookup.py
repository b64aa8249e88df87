"""Finds complete versions in a weight store for a `ChunkRegistry`, by their hash and not by name alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from infra.store.errors import VersionGone
from infra.store.weight_store import WeightStore, open_mapped
from infra.transport.chunk_registry import BlobKey
from schemas.records import PolicyVersion


def store_lookup(store: WeightStore) -> Callable[[BlobKey], memoryview | None]:
    """Return a function that finds a complete version or its delta in `store`; None if the store has other bytes."""

    def find(key: BlobKey) -> memoryview | None:
        text, form, blake3 = key
        with suppress(ValueError, VersionGone, FileNotFoundError):
            version = PolicyVersion.parse(text)
            if store.seal(version).blake3 == blake3:
                return store.open_delta(version) if form == "delta" else open_mapped(store.path(version))
        return None

    return find
