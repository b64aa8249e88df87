"""What a relay can hand out: versions that are whole, and those that are arriving, chunk by chunk as they come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from infra.transport.chunked_blob import ChunkedBlob, missing_of

Key = tuple[str, str, str]


class Holding:
    """The bytes of a cargo in `data`, of which some chunks are there; of a whole one no `cargo` need be known."""

    def __init__(self, data: memoryview, cargo: ChunkedBlob | None = None) -> None:
        self.data = data
        self._cargo = cargo
        self._have = [] if cargo is None else [False] * cargo.chunks
        self._left = len(self._have)
        self._changed = threading.Condition()
        self._gone = False
        self._moved_at = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since a chunk came."""
        return time.monotonic() - self._moved_at

    @property
    def whole(self) -> bool:
        return not self._left

    @property
    def empty(self) -> bool:
        """Whether nothing has come."""
        return 0 < self._left == len(self._have)

    def missing(self) -> list[int]:
        """The chunks that are not there yet."""
        with self._changed:
            return missing_of(self._have)

    def has(self, chunk: int) -> bool:
        return not self._have or self._have[chunk]

    def mark(self, chunk: int) -> None:
        """Chunk `chunk` is there, and checked."""
        with self._changed:
            if not self._have[chunk]:
                self._have[chunk] = True
                self._left -= 1
                self._moved_at = time.monotonic()
                self._changed.notify_all()

    def give_up(self) -> None:
        """No more chunks come: who waits for one need not."""
        with self._changed:
            self._gone = True
            self._changed.notify_all()

    def wait(self, span: slice, timeout_s: float) -> bool | None:
        """Whether the bytes of `span` are there, waiting for them; None once they will not come."""
        cargo = self._cargo
        if cargo is None:
            return True
        chunks = range(span.start // cargo.chunk_bytes, min(-(-span.stop // cargo.chunk_bytes), cargo.chunks))
        with self._changed:
            self._changed.wait_for(lambda: self._gone or all(self._have[c] for c in chunks), timeout_s)
            return True if all(self._have[c] for c in chunks) else None if self._gone else False


class ChunkRegistry:
    """Holdings by key. `find_whole` looks for a version that is complete in the store, and may know nothing of it."""

    def __init__(self, find_whole: Callable[[Key], memoryview | None]) -> None:
        self._find_whole = find_whole
        self._holdings: dict[Key, Holding] = {}
        self._changed = threading.Condition()

    def add(self, key: Key, holding: Holding) -> None:
        """Hand out `holding` from now on."""
        with self._changed:
            self._holdings[key] = holding
            self._changed.notify_all()

    def remove(self, key: Key) -> None:
        """Hand it out no more; what is being sent is sent."""
        with self._changed:
            holding = self._holdings.pop(key, None)
        if holding is not None:
            holding.give_up()

    def keep(self, wanted: Callable[[Key], bool]) -> None:
        """Remove what is not `wanted` any more."""
        with self._changed:
            unwanted = [key for key in self._holdings if not wanted(key)]
        for key in unwanted:
            self.remove(key)

    def find(self, key: Key) -> Holding | None:
        """The holding of `key`; None if there is none."""
        with self._changed:
            found = self._holdings.get(key)
        if found is not None:
            return found
        data = self._find_whole(key)
        if data is None:
            return None
        with self._changed:
            return self._holdings.setdefault(key, Holding(data))

    def wait(self, key: Key, timeout_s: float) -> Holding | None:
        """The holding of `key`, waiting until there is one."""
        deadline = time.monotonic() + timeout_s
        while (found := self.find(key)) is None and (left := deadline - time.monotonic()) > 0:
            with self._changed:
                self._changed.wait(min(left, 0.05))
        return found
