"""Chunks of a version that come from a place of this machine's own, not from another relay: each is compared with the
checksum in the manifest, and only the right ones arrive."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from crc32c import crc32c

from infra.store.errors import StoreError
from infra.store.object_tier import ObjectTier
from infra.store.weight_store import WeightStore
from infra.transport.chunk_registry import BlobBuffer
from infra.transport.chunked_blob import ChunkedBlob

READERS = 8
"""Requests to an object store at once: each waits for the network most of its time."""


def copy_chunks(copies: WeightStore, blob: ChunkedBlob, buffer: BlobBuffer, into: memoryview) -> None:
    """Copy the chunks of `blob` from `copies` that have its checksums; the others stay missing."""
    with suppress(StoreError), copies.read(blob.version, blob.blake3) as data:
        for chunk in range(blob.chunks):
            span = blob.span(chunk)
            if crc32c(data[span]) == blob.checks[chunk]:
                into[span] = data[span]
                buffer.mark_present(chunk)


def read_chunks(
    objects: ObjectTier, blob: ChunkedBlob, buffer: BlobBuffer, into: memoryview, stop: Callable[[], bool]
) -> bool:
    """Read the missing chunks of `blob` from `objects`; whether all are here now.

    Those without the right checksum stay missing. Ends early once `stop`. Raises OSError if the store refuses.
    """
    if not objects.has(blob.version, blob.blake3):
        return False
    with objects.reading(blob.version) as source, ThreadPoolExecutor(READERS) as pool:

        def read(chunk: int) -> None:
            if stop():
                return
            span = blob.span(chunk)
            with suppress(ValueError):  # the file ends before
                source.read_into(span.start, into[span])
                if crc32c(into[span]) == blob.checks[chunk]:
                    buffer.mark_present(chunk)

        for _ in pool.map(read, buffer.missing()):
            pass
    return buffer.complete
