"""Transfer of KV caches with trajectories: offered under a secret name for a limited time, fetched like weights.

The bytes stay in the memory of the process that computed them, so nothing is left when it dies. A destination that
cannot fetch them recomputes them.
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
from infra.transport.chunk_registry import BlobBuffer, BlobKey, ChunkRegistry
from infra.transport.chunked_blob import ChunkedBlob
from infra.transport.frames import TransportError
from infra.transport.peer import dial
from infra.transport.relay_node import Endpoint
from infra.transport.serving import Server
from infra.transport.throttle import Link
from schemas.records import KVManifest, PolicyVersion

OFFER_S = 10.0
_CHUNK_BYTES = 8 << 20
_AHEAD = 4
"""Chunk requests in flight."""
_MAX_FETCHES = 4
"""KV blobs fetched in parallel."""


class _OfferedKV(NamedTuple):
    key: BlobKey
    data: memoryview
    expires_at: float


class KVTransfers:
    """The KV that one process of `run` offers, at most `max_bytes` bytes in total, and the KV that it fetches.

    An offer that is not fetched within `offer_s` seconds expires. Fetched KV may have at most `max_bytes` bytes.
    """

    def __init__(
        self,
        run: str,
        endpoint: Endpoint,
        max_bytes: int,
        offer_s: float = OFFER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._token, self._max_bytes, self._offer_s, self._clock = (
            run,
            endpoint.token,
            max_bytes,
            offer_s,
            clock,
        )
        self._tls = endpoint.tls
        self._offered: OrderedDict[str, _OfferedKV] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._registry = ChunkRegistry(lambda key: None)
        self._server = Server(
            self._registry, run, endpoint.token, Link(), host=endpoint.host, port=endpoint.port, tls=endpoint.tls
        )
        self.address = endpoint.address_at(self._server.port)
        self._pool = ThreadPoolExecutor(_MAX_FETCHES, "kv transfers")

    def offer(self, version: PolicyVersion, tokens: int, data: memoryview) -> KVManifest | None:
        """Offer `data`, the KV of `tokens` tokens under `version`, to its next owner; None above `max_bytes`."""
        self.expire()
        name = secrets.token_hex(16)
        if len(data):
            with self._lock:
                if self._bytes + len(data) > self._max_bytes:
                    return None
                key = (str(version), "kv", name)
                self._offered[name] = _OfferedKV(key, data, self._clock() + self._offer_s)
                self._bytes += len(data)
            self._registry.add(key, BlobBuffer(data))
        checks = tuple(crc32c(data[at : at + _CHUNK_BYTES]) for at in range(0, len(data), _CHUNK_BYTES))
        return KVManifest(self.address, name, version, tokens, len(data), _CHUNK_BYTES, checks)

    def fetch(self, manifest: KVManifest) -> Future[memoryview]:
        """Fetch the bytes of `manifest`; the future raises TransportError if they cannot be fetched."""
        if not manifest.bytes or manifest.address == self.address:
            found: Future[memoryview] = Future()
            data = self._remove(manifest.name) if manifest.bytes else memoryview(b"")
            if data is None:
                found.set_exception(TransportError(f"KV {manifest.name[:8]} has expired or was fetched"))
            else:
                found.set_result(data)
            return found
        return self._pool.submit(self._pull, manifest)

    def expire(self) -> None:
        """Remove the offers that have expired."""
        now = self._clock()
        while self._offered:
            name, offered = next(iter(self._offered.items()))
            if offered.expires_at > now:
                return
            self._remove(name)

    def close(self) -> None:
        """Stop offering and fetching."""
        self._server.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _remove(self, name: str) -> memoryview | None:
        with self._lock:
            offered = self._offered.pop(name, None)
            if offered is None:
                return None
            self._bytes -= len(offered.data)
        self._registry.remove(offered.key)
        return offered.data

    def _pull(self, manifest: KVManifest) -> memoryview:
        if not 0 < manifest.bytes <= self._max_bytes or not 1 <= manifest.chunk_bytes <= MAX_CHUNK_BYTES:
            raise TransportError(
                f"KV of {manifest.bytes} bytes in chunks of {manifest.chunk_bytes}: at most {self._max_bytes} bytes "
                "are accepted"
            )
        try:
            blob = ChunkedBlob(
                manifest.policy_version,
                "kv",
                manifest.name,
                manifest.bytes,
                manifest.chunk_bytes,
                manifest.chunk_checksums,
            )
        except ValueError as error:
            raise TransportError(str(error)) from error
        memory = memoryview(bytearray(manifest.bytes))
        peer = dial(manifest.address, self._run, self._token, -1, blob, memory, Link(), False, self._tls)
        try:
            for chunk in range(min(_AHEAD, blob.chunks)):
                peer.request(chunk)
            for chunk in range(blob.chunks):
                arrived, valid = peer.receive_chunk()
                if not valid:
                    raise TransportError(f"chunk {arrived} of KV {manifest.name[:8]} is corrupted")
                if chunk + _AHEAD < blob.chunks:
                    peer.request(chunk + _AHEAD)
        finally:
            peer.close()
        return memory
