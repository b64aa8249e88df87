"""Hashes a version while its chunks arrive."""

from __future__ import annotations

from collections.abc import Callable

from infra.store.incoming_version import IncomingVersion
from infra.transport.chunk_registry import BlobBuffer
from infra.transport.chunked_blob import ChunkedBlob


class IncrementalHasher:
    """Hashes arriving bytes, one chunk per call, while chunks arrive more slowly than they are hashed.

    Otherwise hashing would take processor time from the transfer; the seal then hashes the rest with all processors.
    """

    def __init__(
        self, blob: ChunkedBlob, buffer: BlobBuffer, arriving: IncomingVersion, clock: Callable[[], float]
    ) -> None:
        self._blob, self._buffer, self._arriving, self._clock = blob, buffer, arriving, clock
        self._hash_s = 0.0
        self._last_end = 0.0

    def __call__(self) -> None:
        began = self._clock()
        if began - self._last_end >= self._hash_s:
            missing = self._buffer.missing()
            complete = self._blob.span(missing[0]).start if missing else self._blob.bytes
            end = min(complete, self._arriving.hashed + self._blob.chunk_bytes)
            if end > self._arriving.hashed:
                self._arriving.hash_to(end)
                self._hash_s = self._clock() - began
        self._last_end = self._clock()
