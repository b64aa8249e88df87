"""Transfer of KV caches with trajectories: offered under a secret name for a limited time, fetched like weights.

The bytes stay in the memory of the process that computed them, so nothing is left when it dies. A destination that
cannot fetch them recomputes them. The KV of a trajectory that ran in stages is in several processes: its manifest then
names a list of manifests, one for each part, in the order of the layers.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, NamedTuple

from infra.store.chunks import MAX_CHUNK_BYTES, chunk_checksums
from infra.system import SYSTEM, System
from infra.transport.chunk_registry import BlobBuffer, BlobKey, ChunkRegistry
from infra.transport.chunked_blob import ChunkedBlob
from infra.transport.dialer import FailedAddresses
from infra.transport.endpoint import Endpoint
from infra.transport.frames import FrameKind, PeerUnreachable, TransportError
from infra.transport.peer import dial
from infra.transport.serving import Handler, Server
from infra.transport.throttle import Link
from schemas.records import KVManifest, PolicyVersion

log = logging.getLogger(__name__)

OFFER_S = 10.0
_CHUNK_BYTES = 8 << 20
_AHEAD = 4
"""Chunk requests in flight."""
_MAX_FETCHES = 4
"""KV blobs fetched in parallel."""
_PARTS = "parts-"
"""The names of lists of manifests begin with it."""
_MAX_PARTS = 64


class _OfferedKV(NamedTuple):
    key: BlobKey
    data: memoryview
    expires_at: float


class KVTransfers:
    """The KV that one process of `run` offers, at most `max_bytes` bytes in total, and the KV that it fetches.

    An offer that is not fetched within `offer_s` seconds expires. Fetched KV may have at most `max_bytes` bytes. Data
    passes the links `sending` and `receiving`. Its server also serves connections of the kinds in `handlers`, which may
    be added at any time.
    """

    def __init__(
        self,
        run: str,
        endpoint: Endpoint,
        max_bytes: int,
        offer_s: float = OFFER_S,
        clock: Callable[[], float] | None = None,
        sending: Link | None = None,
        receiving: Link | None = None,
        chunk_bytes: int = _CHUNK_BYTES,
        system: System = SYSTEM,
    ) -> None:
        self._chunk_bytes, self._system = chunk_bytes, system
        self.run, self.endpoint, self.max_bytes = run, endpoint, max_bytes
        self.sending, self.receiving = sending or Link(), receiving or Link()
        self.handlers: dict[FrameKind, Handler] = {}
        self._offer_s, self._clock = offer_s, clock or system.monotonic
        self._offered: OrderedDict[str, _OfferedKV] = OrderedDict()
        self._bytes = 0
        self._failed = FailedAddresses(self._clock)
        self._lock = threading.Lock()
        self._registry = ChunkRegistry(lambda key: None, system)
        self._server = Server(self._registry, run, endpoint, self.sending, self.handlers, system)
        self.address = endpoint.address_at(self._server.port)
        self._pool = system.pool(_MAX_FETCHES, "kv transfers")

    def offer(self, version: PolicyVersion, tokens: int, data: memoryview, *, parts: bool = False) -> KVManifest | None:
        """Offer `data`, the KV of `tokens` tokens under `version`, to its next owner; None above `max_bytes`.

        With `parts`, `data` is a list of manifests, see `encode_parts`.
        """
        self.expire()
        name = (_PARTS if parts else "") + self._system.secret_name()
        if len(data):
            with self._lock:
                if self._bytes + len(data) > self.max_bytes:
                    return None
                key = (str(version), "kv", name)
                self._offered[name] = _OfferedKV(key, data, self._clock() + self._offer_s)
                self._bytes += len(data)
            self._registry.add(key, BlobBuffer(data, system=self._system))
        size = self._chunk_bytes
        return KVManifest(self.address, name, version, tokens, len(data), size, chunk_checksums(data, size))

    def fetch(self, manifest: KVManifest) -> Future[memoryview]:
        """Fetch the bytes of `manifest`; the future raises TransportError if they cannot be fetched."""
        if manifest.name.startswith(_PARTS):
            return self._pool.submit(self._fetch_parts, manifest)
        if not manifest.bytes or manifest.address == self.address:
            found: Future[memoryview] = Future()
            try:
                found.set_result(self._take(manifest))
            except TransportError as error:
                found.set_exception(error)
            return found
        return self._pool.submit(self._pull, manifest)

    def fetch_now(self, manifest: KVManifest) -> memoryview:
        """The bytes of `manifest`. Raises TransportError."""
        local = not manifest.bytes or manifest.address == self.address
        return self._take(manifest) if local else self._pull(manifest)

    def unreachable(self) -> tuple[str, ...]:
        """The addresses to which the last try failed, in the last 30 seconds: nothing is fetched from them."""
        return self._failed.addresses()

    @property
    def offers(self) -> int:
        """The number of offers that others may still fetch."""
        return len(self._offered)

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

    def _take(self, manifest: KVManifest) -> memoryview:
        """The bytes of a manifest of this process, or of an empty one."""
        data = self._remove(manifest.name) if manifest.bytes else memoryview(b"")
        if data is None:
            raise TransportError(f"KV {manifest.name[:8]} has expired or was fetched")
        return data

    def _fetch_parts(self, manifest: KVManifest) -> memoryview:
        """The parts of the KV of one trajectory, joined."""
        parts = decode_parts(self.fetch_now(manifest))
        if sum(part.bytes for part in parts) > self.max_bytes:
            raise TransportError(f"KV in {len(parts)} parts exceeds {self.max_bytes} bytes")
        return memoryview(bytearray().join(self.fetch_now(part) for part in parts))

    def _pull(self, manifest: KVManifest) -> memoryview:
        if not 0 < manifest.bytes <= self.max_bytes or not 1 <= manifest.chunk_bytes <= MAX_CHUNK_BYTES:
            raise TransportError(
                f"KV of {manifest.bytes} bytes in chunks of {manifest.chunk_bytes}: at most {self.max_bytes} bytes "
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
        if manifest.address in self.unreachable():  # each try may take seconds, for which its trajectory waits
            raise PeerUnreachable(f"{manifest.address} could not be reached lately")
        memory = memoryview(bytearray(manifest.bytes))
        token, tls = self.endpoint.token, self.endpoint.tls
        try:
            peer = dial(manifest.address, self.run, token, -1, blob, memory, self.receiving, False, tls, self._system)
        except PeerUnreachable as error:
            if self._failed.add(manifest.address):
                log.warning(
                    "KV cannot be fetched, it is computed again: %s; if the rollout at this address is up (`laminar "
                    "replicas` names it), set relay.advertise on its machine to an address that other machines reach",
                    error,
                )
            raise
        self._failed.remove(manifest.address)
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


def encode_parts(parts: Sequence[KVManifest]) -> memoryview:
    """`parts` as the bytes of a list of manifests."""
    plain = [{**asdict(part), "policy_version": str(part.policy_version)} for part in parts]
    return memoryview(json.dumps(plain, separators=(",", ":")).encode())


def decode_parts(data: memoryview) -> list[KVManifest]:
    """The manifests in `data`. Raises TransportError if it is not a list of them."""
    try:
        listed = json.loads(bytes(data))
        if not isinstance(listed, list) or len(listed) > _MAX_PARTS:
            raise ValueError(f"not a list of at most {_MAX_PARTS} parts")
        return [_manifest(**part) for part in listed]
    except (ValueError, TypeError, RecursionError) as error:
        raise TransportError(f"a list of KV manifests cannot be decoded: {error}") from error


def _manifest(
    address: Any, name: Any, policy_version: Any, tokens: Any, bytes: Any, chunk_bytes: Any, chunk_checksums: Any
) -> KVManifest:
    """A manifest from JSON. Raises ValueError or TypeError for a field of another type."""
    numbers = (tokens, bytes, chunk_bytes, *chunk_checksums)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("sizes and checksums must be natural numbers")
    version = PolicyVersion.parse(str(policy_version))
    return KVManifest(str(address), str(name), version, tokens, bytes, chunk_bytes, tuple(chunk_checksums))
