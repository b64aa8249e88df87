"""RelayNode: the data plane of a relay. Its threads serve the machine's versions and fetch the newest missing one.

The control plane passes the manifests (`set_manifests`) and the chain (`set_chain`); the node does the rest, and
continues without further input. It fetches one version at a time. Chunks that have arrived are kept when a source is
lost or the chain changes: only the missing chunks are pulled again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from infra.store.deltas import apply_delta
from infra.store.errors import CorruptVersion, StoreBusy, StoreError, VersionExists
from infra.store.incoming_version import IncomingVersion
from infra.store.layout import Layout
from infra.store.model_parts import ModelParts, model_parts, runs_of
from infra.store.object_tier import ObjectTier
from infra.store.weight_store import WeightStore, is_wanted
from infra.system import SYSTEM, System
from infra.transport.chunk_registry import BlobBuffer, ChunkRegistry, store_lookup
from infra.transport.chunked_blob import ChunkedBlob, delta_blob, full_blob
from infra.transport.dialer import Dialer
from infra.transport.endpoint import Endpoint
from infra.transport.fetch import Fetch, TransferCounts
from infra.transport.frames import FrameKind
from infra.transport.incremental_hasher import IncrementalHasher
from infra.transport.peer import Peer
from infra.transport.serving import Server
from infra.transport.throttle import Link
from infra.transport.tier_chunks import copy_chunks, read_chunks
from infra.transport.topology import TRAINER, Upstream, find_link, upstream_of
from infra.transport.weight_pusher import IncomingPushes
from schemas.records import PolicyVersion, RelayChain, WeightVersion

log = logging.getLogger(__name__)

STALL_S = 2.0
"""Seconds without progress after which a newer version is fetched instead."""
RETRY_S = 1.0
"""Seconds before a version that could not be fetched is tried again."""
YIELD_S = 0.05
"""Seconds for which others may write to the store after a failed fetch: a trainer may restore the version."""
KEEP_PARTIAL_S = 60.0
"""Seconds for which a partial version without a source is kept: placement names a new master sooner."""
MAX_RUNS = 64
"""Runs of arrived chunks that are reported."""
MAX_CORRUPT_ARRIVALS = 3
"""Times that a version may arrive complete and corrupted before its manifest is invalid."""


@dataclass(frozen=True)
class Arrival:
    """Progress of the version that is being fetched: `arrived` of `bytes` bytes; `chunks` has runs of whole chunks, as
    `runs_of` returns them."""

    version: PolicyVersion
    arrived: int
    bytes: int
    chunks: tuple[int, ...] = ()


class RelayNode:
    """The data plane of relay `relay` of `run`, over `store`. It sends and receives through two links.

    What the machine's disk has of a version, or of the parent of its delta, in `copies`, is not fetched. What no other
    relay has is read from `objects`.
    """

    def __init__(
        self,
        store: WeightStore,
        run: str,
        relay: int,
        endpoint: Endpoint,
        sending: Link | None = None,
        receiving: Link | None = None,
        system: System = SYSTEM,
        copies: WeightStore | None = None,
        objects: ObjectTier | None = None,
    ) -> None:
        self.relay = relay
        self._tiers = [store] if copies is None else [store, copies]
        """Where a version may be, the nearest first: memory, disk."""
        self._objects = objects
        self._system, self._clock = system, system.monotonic
        self.counts = TransferCounts()
        self.sending, self.receiving = sending or Link(), receiving or Link()
        self._store, self._run, self._endpoint = store, run, endpoint
        self._registry = ChunkRegistry(store_lookup(store), system)
        self._pushes = IncomingPushes(self._is_stored, system)
        self.chain: RelayChain | None = None
        """The current chain."""
        self._manifests: dict[PolicyVersion, WeightVersion] = {}
        self._invalid_manifests: list[tuple[WeightVersion, str]] = []
        self._corrupt_arrivals: dict[str, int] = {}
        self._retry_at: dict[PolicyVersion, float] = {}
        self._dialer = Dialer(run, relay, endpoint, self.receiving, system=system)
        self._arriving: tuple[ChunkedBlob, BlobBuffer] | None = None
        self._closed = False
        self._changed = system.condition()
        self._server = Server(
            self._registry, run, endpoint, self.sending, {FrameKind.OFFER: self._pushes.accept}, system
        )
        self.address = endpoint.relay_address(self._server.port)
        self._thread = system.start_thread("relay", self._fetch_loop, vital=True)

    def set_manifests(self, manifests: Iterable[WeightVersion]) -> None:
        """Replace the manifests of the versions to fetch; of two manifests of one version the last counts."""
        manifests_by_version = {manifest.version: manifest for manifest in manifests}
        with self._changed:
            if manifests_by_version != self._manifests:
                self._manifests = manifests_by_version
                self._changed.notify_all()

    def set_chain(self, chain: RelayChain) -> None:
        """Use `chain` from now on: the last one in the log counts, whatever its number."""
        with self._changed:
            if chain != self.chain:
                self.chain = chain
                self._changed.notify_all()

    def take_invalid_manifests(self) -> list[tuple[WeightVersion, str]]:
        """Return the manifests found invalid since the last call, with the reasons."""
        with self._changed:
            found, self._invalid_manifests = self._invalid_manifests, []
            return found

    @property
    def is_master(self) -> bool:
        """Whether the trainer's versions come to this relay first."""
        return self.chain is not None and [link.relay for link in self.chain.links[:1]] == [self.relay]

    def unreachable(self) -> tuple[str, ...]:
        """Addresses of relays to which no connection could be opened lately."""
        return self._dialer.unreachable()

    def arriving(self) -> Arrival | None:
        """The progress of the current fetch; None if there is none."""
        now = self._arriving
        if now is None:
            return None
        blob, buffer = now
        absent = buffer.missing()
        missing = sum(span.stop - span.start for span in map(blob.span, absent))
        present = set(range(blob.chunks)).difference(absent) if blob.form == "full" else ()
        return Arrival(blob.version, blob.bytes - missing, blob.bytes, runs_of(present, MAX_RUNS))

    def close(self) -> None:
        """Stop serving and fetching; an incomplete version is discarded."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._pushes.close()
        self._server.close()
        self._thread.join(timeout=15)

    def _is_stored(self, version: PolicyVersion) -> bool:
        return version in self._store.versions()

    def _fetch_loop(self) -> None:
        while not self._closed:
            manifest = self._target()
            if manifest is None:
                self._release_evicted()
                self._store.drop_lost_spare()
                with self._changed:
                    if not self._closed:
                        self._changed.wait(0.25)
                continue
            try:
                self._fetch_version(manifest)
            except ValueError as error:
                self._reject_manifest(manifest, str(error))
            except VersionExists:
                pass
            except (StoreError, OSError, BufferError) as error:
                level = logging.DEBUG if isinstance(error, StoreBusy) else logging.WARNING
                log.log(level, "version %s could not be fetched, it will be tried again: %s", manifest.version, error)
                self._retry_at[manifest.version] = self._clock() + RETRY_S
            finally:
                self._arriving = None
                self._store.release_writer()
            if not self._is_stored(manifest.version):
                with self._changed:
                    if not self._closed:
                        self._changed.wait(YIELD_S)

    def _target(self) -> WeightVersion | None:
        """The newest missing version that the store should get and that is not waiting for a retry."""
        here, live = self._store.versions(), self._store.live_versions()
        with self._changed:
            if self.chain is None:
                return None
            wanted = [version for version in self._fetchable() if is_wanted(version, here, live, self._store.keep)]
            return self._manifests[max(wanted)] if wanted else None

    def _fetchable(self) -> list[PolicyVersion]:
        """The versions with a manifest that are not waiting for a retry."""
        now = self._clock()
        return [version for version in self._manifests if self._retry_at.get(version, 0.0) <= now]

    def _fetch_version(self, manifest: WeightVersion) -> None:
        blob = full_blob(manifest)
        layout = Layout(manifest.tensors) if manifest.tensors else None
        if layout is not None and layout.size != manifest.bytes:
            raise ValueError(f"its tensors take {layout.size} bytes, it declares {manifest.bytes}")
        here = self._tier_of(manifest.version, manifest.blake3)
        delta = self._fetch_delta(manifest) if here is None else None
        self._store.evict(max(1, self._store.keep - 1))  # the incoming version counts too
        self._release_evicted(manifest.version)
        with self._store.begin(manifest.version, blob.bytes) as arriving:
            buffer = BlobBuffer(arriving.read_only_view(), blob, self._system)
            self._registry.add(blob.key, buffer)
            try:
                if here is not None:
                    copy_chunks(here, blob, buffer, arriving.view)
                rebuilt = delta is not None and self._rebuild(manifest, delta, arriving)
                if rebuilt:
                    for chunk in range(blob.chunks):
                        buffer.mark_present(chunk)
                elif not self._fetch(blob, buffer, arriving, parts=_parts_of(manifest)) and not self._read_objects(
                    blob, buffer, arriving
                ):
                    self._retry_at[manifest.version] = self._clock() + RETRY_S
                    return
                if layout is not None and not layout.matches(arriving.view):
                    raise ValueError("its tensors do not match the header of its bytes")
                arriving.seal(manifest.blake3)
                self._reserve(blob.bytes)
                how = "fetched as a delta" if rebuilt else "fetched in full" if here is None else "from the disk"
                log.info("version %s is complete, %s", manifest.version, how)
            except CorruptVersion as error:
                self.counts.corrupted += 1
                wrong = self._corrupt_arrivals[manifest.blake3] = self._corrupt_arrivals.get(manifest.blake3, 0) + 1
                if wrong >= MAX_CORRUPT_ARRIVALS:
                    raise ValueError(f"{error}, {wrong} times") from error
                raise
            finally:
                if not self._is_stored(manifest.version):
                    self._registry.remove(blob.key)

    def _fetch(
        self,
        blob: ChunkedBlob,
        buffer: BlobBuffer,
        arriving: IncomingVersion | None,
        *,
        max_attempts: int = 3,
        parts: ModelParts | None = None,
    ) -> bool:
        """Pull the missing chunks, following changes of the chain; return False if the fetch is abandoned."""
        self._arriving = (blob, buffer)
        memory = arriving.view if arriving is not None else buffer.data
        while not self._closed:
            chain = self.chain
            assert chain is not None
            upstream = upstream_of(chain, self.relay, blob.chunks, parts)

            def connect(source: int, chain: RelayChain = chain, upstream: Upstream = upstream) -> Peer:
                may_wait = source in upstream.may_wait
                if source == TRAINER:
                    return self._pushes.peer(blob, memory, self.receiving)
                link = find_link(chain, source)
                assert link is not None
                return self._dialer.dial(link, blob, memory, may_wait)

            def stop(chain: RelayChain = chain, upstream: Upstream = upstream) -> bool:
                changed = self._sources_changed(chain, upstream, blob, parts)
                return self._closed or changed or self._superseded(blob, buffer)

            hasher = None if arriving is None else IncrementalHasher(blob, buffer, arriving, self._clock)
            fetch = Fetch(blob, buffer, upstream.plan, upstream.fallbacks, connect, self.counts, self._system)
            if fetch.run(stop, hasher or (lambda: None), max_attempts):
                return True
            if not self._sources_changed(chain, upstream, blob, parts):
                if arriving is None or buffer.empty or buffer.idle_s > KEEP_PARTIAL_S or self._superseded(blob, buffer):
                    return False
                with self._changed:
                    if self.chain is chain and not self._closed:
                        self._changed.wait(RETRY_S)
        return False

    def _read_objects(self, blob: ChunkedBlob, buffer: BlobBuffer, arriving: IncomingVersion) -> bool:
        """Read what no relay could give from the object store; whether the version is here now."""
        if self._objects is None or self._closed:
            return False

        def stop() -> bool:
            return self._closed or self._superseded(blob, buffer)

        if not read_chunks(self._objects, blob, buffer, arriving.view, stop):
            return False
        log.info("version %s was read from %s", blob.version, self._objects.folder)
        return True

    def _sources_changed(
        self, before: RelayChain, upstream: Upstream, blob: ChunkedBlob, parts: ModelParts | None
    ) -> bool:
        """Whether the chain now gives other sources than `upstream`, or other addresses of them."""
        chain = self.chain
        assert chain is not None
        if chain.number == before.number:
            return False
        elsewhere = any(find_link(chain, each) != find_link(before, each) for each in upstream.may_wait)
        return elsewhere or upstream_of(chain, self.relay, blob.chunks, parts) != upstream

    def _superseded(self, blob: ChunkedBlob, buffer: BlobBuffer) -> bool:
        """Whether to abandon this fetch: it is stalled, and there is a newer version or its manifest is gone.

        An older version than the newest stored one is abandoned as soon as a newer one can be fetched.
        """
        newest = self._store.newest()
        with self._changed:
            newer = any(version > blob.version for version in self._manifests)
            gone = blob.version not in self._manifests
            first = newest is not None and blob.version < newest < max(self._fetchable(), default=newest)
        return first or ((newer or gone) and buffer.idle_s > STALL_S)

    def _fetch_delta(self, manifest: WeightVersion) -> memoryview | None:
        """Fetch the delta of this version if its parent is stored; None: fetch the full version."""
        blob = delta_blob(manifest)
        if blob is None or manifest.delta is None or blob.bytes > manifest.bytes:
            return None
        with suppress(StoreError):
            if self._tier_of(manifest.delta.parent, manifest.delta.parent_blake3) is not None:
                memory = memoryview(bytearray(blob.bytes))
                buffer = BlobBuffer(memory, blob, self._system)
                self._registry.add(blob.key, buffer)
                if self._fetch(blob, buffer, None, max_attempts=1):
                    return memory
                self._registry.remove(blob.key)
        return None

    def _tier_of(self, version: PolicyVersion, blake3: str) -> WeightStore | None:
        """The nearest tier that has these bytes of `version`; None if none has."""
        for tier in self._tiers:
            with suppress(StoreError):
                if tier.seal(version).blake3 == blake3:
                    return tier
        return None

    def _rebuild(self, manifest: WeightVersion, delta: memoryview, arriving: IncomingVersion) -> bool:
        """Apply the delta to the parent; log the reason and return False if the result is not the version."""
        assert manifest.delta is not None
        try:
            tier = self._tier_of(manifest.delta.parent, manifest.delta.parent_blake3) or self._store
            with tier.read(manifest.delta.parent, manifest.delta.parent_blake3) as parent:
                apply_delta(delta, parent, arriving.view)
            arriving.hash_to(arriving.size)
            if arriving.digest() == manifest.blake3:
                return True
            problem = "the result does not have the blake3 of the manifest"
        except (ValueError, StoreError) as error:
            problem = str(error)
        self.counts.corrupted += 1
        arriving.reset_hash()
        log.warning("the delta of version %s cannot be applied, fetching it in full: %s", manifest.version, problem)
        return False

    def _reserve(self, size: int) -> None:
        """Reserve memory for the next version, so that its first chunks are forwarded without delay."""
        with suppress(StoreError):  # fetching the next version reports the lack of memory
            self._store.evict()
            self._release_evicted()
            self._store.reserve(size)

    def _release_evicted(self, arriving: PolicyVersion | None = None) -> None:
        """Serve only stored versions and the one that is `arriving`: the memory of others is freed."""
        kept = {str(version) for version in (*self._store.versions(), arriving)}
        self._registry.retain(lambda key: key[0] in kept)

    def _reject_manifest(self, manifest: WeightVersion, reason: str) -> None:
        with self._changed:
            self._invalid_manifests.append(
                (manifest, f"the manifest of version {manifest.version} is invalid: {reason}")
            )
            if self._manifests.get(manifest.version) == manifest:
                del self._manifests[manifest.version]
        self._retry_at[manifest.version] = self._clock() + RETRY_S


def _parts_of(manifest: WeightVersion) -> ModelParts | None:
    """The parts of a version; None for one without layers."""
    try:
        return model_parts(manifest)
    except ValueError:
        return None
