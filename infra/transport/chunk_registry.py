"""The blobs that a relay serves: complete versions, and incomplete ones whose chunks are served as they arrive."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from infra.store.errors import VersionGone
from infra.store.weight_store import WeightStore, open_mapped
from infra.system import SYSTEM, System
from infra.transport.chunked_blob import ChunkedBlob
from schemas.records import PolicyVersion

BlobKey = tuple[str, str, str]


class BlobBuffer:
    """The bytes of a blob in `data`, of which some chunks have arrived. Without `blob` all of `data` is present."""

    def __init__(self, data: memoryview, blob: ChunkedBlob | None = None, system: System = SYSTEM) -> None:
        self.data = data
        self._clock = system.monotonic
        self._blob = blob
        self._present = [] if blob is None else [False] * blob.chunks
        self._missing = len(self._present)
        self._changed = system.condition()
        self._abandoned = False
        self._progress_at = self._clock()

    @property
    def idle_s(self) -> float:
        """Seconds since the last chunk arrived."""
        return self._clock() - self._progress_at

    @property
    def complete(self) -> bool:
        return not self._missing

    @property
    def empty(self) -> bool:
        """Whether no chunk has arrived."""
        return 0 < self._missing == len(self._present)

    def missing(self) -> list[int]:
        """The chunks that have not arrived."""
        with self._changed:
            return [chunk for chunk, arrived in enumerate(self._present) if not arrived]

    def has(self, chunk: int) -> bool:
        return not self._present or self._present[chunk]

    def mark_present(self, chunk: int) -> None:
        """Record that chunk `chunk` has arrived and its checksum is correct."""
        with self._changed:
            if not self._present[chunk]:
                self._present[chunk] = True
                self._missing -= 1
                self._progress_at = self._clock()
                self._changed.notify_all()

    def abandon(self) -> None:
        """Wake all waiting readers: no more chunks will arrive."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def wait(self, span: slice, timeout_s: float) -> bool | None:
        """Wait for the bytes of `span` and return whether they are present; None if they will not arrive."""
        blob = self._blob
        if blob is None:
            return True
        chunks = range(span.start // blob.chunk_bytes, min(-(-span.stop // blob.chunk_bytes), blob.chunks))
        with self._changed:
            self._changed.wait_for(lambda: self._abandoned or all(self._present[c] for c in chunks), timeout_s)
            return True if all(self._present[c] for c in chunks) else None if self._abandoned else False


class ChunkRegistry:
    """Buffers by key. `find_complete` returns the bytes of a complete version in the store, or None."""

    def __init__(self, find_complete: Callable[[BlobKey], memoryview | None], system: System = SYSTEM) -> None:
        self._system = system
        self._find_complete = find_complete
        self._buffers: dict[BlobKey, BlobBuffer] = {}
        self._changed = system.condition()

    def add(self, key: BlobKey, buffer: BlobBuffer) -> None:
        """Serve `buffer` from now on."""
        with self._changed:
            self._buffers[key] = buffer
            self._changed.notify_all()

    def remove(self, key: BlobKey) -> None:
        """Stop serving the buffer of `key`; transfers under way are completed."""
        with self._changed:
            buffer = self._buffers.pop(key, None)
        if buffer is not None:
            buffer.abandon()

    def retain(self, wanted: Callable[[BlobKey], bool]) -> None:
        """Remove all buffers for which `wanted` is false."""
        with self._changed:
            unwanted = [key for key in self._buffers if not wanted(key)]
        for key in unwanted:
            self.remove(key)

    def find(self, key: BlobKey) -> BlobBuffer | None:
        """Return the buffer of `key`, or None."""
        with self._changed:
            found = self._buffers.get(key)
        if found is not None:
            return found
        data = self._find_complete(key)
        if data is None:
            return None
        with self._changed:
            return self._buffers.setdefault(key, BlobBuffer(data, system=self._system))

    def wait(self, key: BlobKey, timeout_s: float) -> BlobBuffer | None:
        """Wait for the buffer of `key` and return it; None after `timeout_s` seconds."""
        deadline = self._system.monotonic() + timeout_s
        while (found := self.find(key)) is None and (left := deadline - self._system.monotonic()) > 0:
            with self._changed:
                self._changed.wait(min(left, 0.05))
        return found


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
