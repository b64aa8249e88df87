"""What can go wrong in a weight store."""

from __future__ import annotations


class StoreError(RuntimeError):
    """A weight store cannot do what it was asked."""


class NoRoom(StoreError):
    """A version does not fit; nothing of it was copied."""


class VersionGone(StoreError):
    """The store does not hold this version, whole and with its seal: never arrived, still arriving, or evicted."""


class VersionExists(StoreError):
    """The store already holds a version of this name; a version's bytes never change."""


class StoreBusy(StoreError):
    """Another process writes to the store, or uses it."""


class CorruptVersion(StoreError):
    """Bytes are not those that their blake3 says."""
