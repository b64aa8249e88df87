"""Errors of the weight store."""

from __future__ import annotations


class StoreError(RuntimeError):
    """An operation of a weight store failed."""


class NoRoom(StoreError):
    """There is not enough memory for a version; nothing was copied."""


class VersionGone(StoreError):
    """The store has no complete, sealed version of this name: it never arrived, is still arriving, or was evicted."""


class VersionExists(StoreError):
    """The store already has a version of this name; the bytes of a version never change."""


class StoreBusy(StoreError):
    """Another process writes to the store or uses it."""


class CorruptVersion(StoreError):
    """Bytes do not match the expected blake3."""
