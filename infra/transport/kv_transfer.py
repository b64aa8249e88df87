"""KV that leaves a process with its trajectory: offered under a secret name for a while, fetched as weights are.

The bytes lie in the memory of the process that made them, so nothing is left when it dies. Whoever cannot fetch them
computes them anew.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from crc32c import crc32c

from infra.store.chunks import MAX_CHUNK_BYTES
from infra.transport.chunk_registry import ChunkRegistry, Holding, Key
from infra.transport.chunked_blob import ChunkedBlob
from infra.transport.frames import TransportError
from infra.transport.peer import dial
from infra.transport.relay_node import Endpoint
from infra.transport.serving import Server
from infra.transport.throttle import Link
from schemas.records import KVManifest, PolicyVersion

KEEP_S = 10.0
_CHUNK_BYTES = 8 << 20
_AHEAD = 4
"""Chunks that are asked for before the first has come."""
_FETCHES = 4
"""Parcels that are fetched at once."""


class _Kept(NamedTuple):
    key: Key
    data: memoryview
    until: float


class KVTransfers:
    """The parcels of one process of `run`: those it offers, at most `most_bytes` of them, and those it fetches.

    What nobody has fetched after `keep_s` seconds is dropped. One parcel may have `most_bytes` as well.
    """

    def __init__(
        self,
        run: str,
        door: Endpoint,
        most_bytes: int,
        keep_s: float = KEEP_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._token, self._most, self._keep_s, self._clock = run, door.token, most_bytes, keep_s, clock
        self._tls = door.tls
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._shelf = ChunkRegistry(lambda key: None)
        self._server = Server(self._shelf, run, door.token, Link(), host=door.host, port=door.port, tls=door.tls)
        self.address = door.at(self._server.port)
        self._pool = ThreadPoolExecutor(_FETCHES, "kv parcels")

    def offer(self, version: PolicyVersion, tokens: int, data: memoryview) -> KVManifest | None:
        """Keep `data`, the KV of `tokens` tokens under `version`, for its next owner; None where there is no room."""
        self.expire()
        name = secrets.token_hex(16)
        if len(data):
            with self._lock:
                if self._bytes + len(data) > self._most:
                    return None
                key = (str(version), "kv", name)
                self._kept[name] = _Kept(key, data, self._clock() + self._keep_s)
                self._bytes += len(data)
            self._shelf.add(key, Holding(data))
        checks = tuple(crc32c(data[at : at + _CHUNK_BYTES]) for at in range(0, len(data), _CHUNK_BYTES))
        return KVManifest(self.address, name, version, tokens, len(data), _CHUNK_BYTES, checks)

    def fetch(self, parcel: KVManifest) -> Future[memoryview]:
        """Its bytes, as soon as they are here; the future raises TransportError where they cannot be had."""
        if not parcel.bytes or parcel.address == self.address:
            found: Future[memoryview] = Future()
            data = self._take(parcel.name) if parcel.bytes else memoryview(b"")
            if data is None:
                found.set_exception(TransportError(f"parcel {parcel.name[:8]} is here no more"))
            else:
                found.set_result(data)
            return found
        return self._pool.submit(self._pull, parcel)

    def expire(self) -> None:
        """Drop what has lain here too long."""
        now = self._clock()
        while self._kept:
            name, kept = next(iter(self._kept.items()))
            if kept.until > now:
                return
            self._take(name)

    def close(self) -> None:
        """Offer nothing more, and fetch nothing more."""
        self._server.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _take(self, name: str) -> memoryview | None:
        with self._lock:
            kept = self._kept.pop(name, None)
            if kept is None:
                return None
            self._bytes -= len(kept.data)
        self._shelf.remove(kept.key)
        return kept.data

    def _pull(self, parcel: KVManifest) -> memoryview:
        if not 0 < parcel.bytes <= self._most or not 1 <= parcel.chunk_bytes <= MAX_CHUNK_BYTES:
            raise TransportError(f"a parcel of {parcel.bytes} bytes, at most {self._most} are taken")
        try:
            cargo = ChunkedBlob(
                parcel.policy_version, "kv", parcel.name, parcel.bytes, parcel.chunk_bytes, parcel.checks
            )
        except ValueError as error:
            raise TransportError(str(error)) from error
        memory = memoryview(bytearray(parcel.bytes))
        peer = dial(parcel.address, self._run, self._token, -1, cargo, memory, Link(), False, self._tls)
        try:
            for chunk in range(min(_AHEAD, cargo.chunks)):
                peer.ask(chunk)
            for chunk in range(cargo.chunks):
                arrived, whole = peer.take()
                if not whole:
                    raise TransportError(f"chunk {arrived} of parcel {parcel.name[:8]} is damaged")
                if chunk + _AHEAD < cargo.chunks:
                    peer.ask(chunk + _AHEAD)
        finally:
            peer.close()
        return memory
