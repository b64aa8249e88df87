"""Versions that are whole in a store, as a shelf looks for them: by what their bytes are, not by name alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from infra.store.errors import VersionGone
from infra.store.weight_store import WeightStore, open_mapped
from infra.transport.chunk_registry import Key
from schemas.records import PolicyVersion


def whole_finder(store: WeightStore) -> Callable[[Key], memoryview | None]:
    """What finds a complete version, or its delta, in `store`; None where the store has other bytes of that name."""

    def find(key: Key) -> memoryview | None:
        text, form, blake3 = key
        with suppress(ValueError, VersionGone, FileNotFoundError):
            version = PolicyVersion.parse(text)
            if store.seal(version).blake3 == blake3:
                return store.open_delta(version) if form == "delta" else open_mapped(store.path(version))
        return None

    return find
