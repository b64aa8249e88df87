"""RelayNode: a relay's data plane. Threads that serve what its machine has, and fetch the newest that it has not.

The control plane tells it which versions there are (`learn`) and where everybody stands (`obey`); it does the rest by
itself, and goes on while nobody tells it anything. One version arrives at a time. What has arrived of it stays when a
source is lost or the chain changes: only the missing chunks are pulled again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from infra.runners.liveness import LIVENESS
from infra.store.arriving import Arriving
from infra.store.deltas import apply_delta
from infra.store.errors import CorruptVersion, StoreBusy, StoreError, VersionExists
from infra.store.layout import Layout
from infra.store.weight_store import WeightStore, is_wanted
from infra.transport.chunk_registry import ChunkRegistry, Holding
from infra.transport.chunked_blob import ChunkedBlob, delta_blob, full_blob
from infra.transport.fetch import Counts, Fetch
from infra.transport.incoming_pushes import IncomingPushes
from infra.transport.peer import Peer, dial
from infra.transport.serving import Server
from infra.transport.throttle import Link
from infra.transport.tls import Tls
from infra.transport.topology import OFFERED, Upstream, link_of, upstream_of
from infra.transport.wholes import whole_finder
from schemas.records import PolicyVersion, RelayChain, WeightVersion

log = logging.getLogger(__name__)

STALL_S = 2.0
"""How long a version may make no progress before a newer one is fetched in its place."""
PAUSE_S = 1.0
"""How long a version that cannot be had now is left alone."""
TURN_S = 0.05
"""How long the store is left to others after a version did not come: a trainer may bring it back."""
HOLD_S = 60.0
"""How long part of a version is kept while nobody has the rest: longer than placement takes to name another master."""
MAX_WRONG = 3
"""Times that a version may arrive whole and wrong before its manifest is held to be a lie."""


@dataclass(frozen=True)
class Endpoint:
    """Where a relay can be reached: it listens at `host`:`port` (0: any free one), others find it at `advertised`."""

    host: str = "127.0.0.1"
    port: int = 0
    advertised: str = ""
    token: str = ""
    tls: Tls | None = None

    def at(self, port: int) -> str:
        """The address of what listens at `port` behind it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.advertised.rpartition(':')[0] or host}:{port}"


@dataclass(frozen=True)
class Arrival:
    """How much has arrived of what."""

    version: PolicyVersion
    arrived: int
    bytes: int


class RelayNode:
    """The data plane of relay `relay` of `run`, over `store`. What it sends and receives passes through two links."""

    def __init__(
        self,
        store: WeightStore,
        run: str,
        relay: int,
        door: Endpoint = Endpoint(),
        sending: Link | None = None,
        receiving: Link | None = None,
    ) -> None:
        self.relay = relay
        self.counts = Counts()
        self.sending, self.receiving = sending or Link(), receiving or Link()
        self._store, self._run, self._door = store, run, door
        self._shelf = ChunkRegistry(whole_finder(store))
        self._offers = IncomingPushes(self._holds)
        self._chain: RelayChain | None = None
        self._known: dict[PolicyVersion, WeightVersion] = {}
        self._lies: list[tuple[WeightVersion, str]] = []
        self._wrong: dict[str, int] = {}
        self._resting: dict[PolicyVersion, float] = {}
        self._arriving: tuple[ChunkedBlob, Holding] | None = None
        self._closed = False
        self._changed = threading.Condition()
        server = Server(
            self._shelf, run, door.token, self.sending, self._offers.take, door.host, door.port, tls=door.tls
        )
        self._server = server
        self.address = door.advertised or door.at(server.port)
        self._thread = LIVENESS.start_thread("relay", self._work)

    @property
    def chain(self) -> RelayChain | None:
        """The newest chain that it was told."""
        return self._chain

    def learn(self, manifests: Iterable[WeightVersion]) -> None:
        """These are all versions that may be wanted; of two manifests of one version the last counts."""
        known = {manifest.version: manifest for manifest in manifests}
        with self._changed:
            if known != self._known:
                self._known = known
                self._changed.notify_all()

    def obey(self, chain: RelayChain) -> None:
        """Stand where `chain` says: the last one in the log counts, whatever its number."""
        with self._changed:
            if chain != self._chain:
                self._chain = chain
                self._changed.notify_all()

    def lies(self) -> list[tuple[WeightVersion, str]]:
        """Manifests that cannot be true, and why; each is told once."""
        with self._changed:
            lies, self._lies = self._lies, []
            return lies

    def arriving(self) -> Arrival | None:
        """What is on its way."""
        now = self._arriving
        if now is None:
            return None
        cargo, holding = now
        missing = sum(span.stop - span.start for span in map(cargo.span, holding.missing()))
        return Arrival(cargo.version, cargo.bytes - missing, cargo.bytes)

    def close(self) -> None:
        """Stop serving and fetching; what had arrived of an incomplete version is gone."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._offers.close()
        self._server.close()
        self._thread.join(timeout=15)

    def _holds(self, version: PolicyVersion) -> bool:
        return version in self._store.versions()

    # What it fetches.

    def _work(self) -> None:
        while not self._closed:
            manifest = self._target()
            if manifest is None:
                versions = {str(version) for version in self._store.versions()}
                self._shelf.keep(lambda key, held=versions: key[0] in held)  # type: ignore[misc]
                self._store.tidy()
                with self._changed:
                    if not self._closed:
                        self._changed.wait(0.25)
                continue
            try:
                self._get(manifest)
            except ValueError as error:
                self._call_a_lie(manifest, str(error))
            except VersionExists:
                pass
            except (StoreError, OSError, BufferError) as error:
                level = logging.DEBUG if isinstance(error, StoreBusy) else logging.WARNING
                log.log(level, "version %s is not fetched now: %s", manifest.version, error)
                self._resting[manifest.version] = time.monotonic() + PAUSE_S
            finally:
                self._arriving = None
                self._store.rest()
            if not self._holds(manifest.version):
                with self._changed:
                    if not self._closed:
                        self._changed.wait(TURN_S)

    def _target(self) -> WeightVersion | None:
        """The newest version that is not here and that the store would take, but for those that rest."""
        here, live = self._store.versions(), self._store.live()
        with self._changed:
            if self._chain is None:
                return None
            wanted = [version for version in self._awake() if is_wanted(version, here, live, self._store.keep)]
            return self._known[max(wanted)] if wanted else None

    def _awake(self) -> list[PolicyVersion]:
        """The versions that are known and do not rest."""
        now = time.monotonic()
        return [version for version in self._known if self._resting.get(version, 0.0) <= now]

    def _get(self, manifest: WeightVersion) -> None:
        cargo = full_blob(manifest)
        layout = Layout(manifest.tensors) if manifest.tensors else None
        if layout is not None and layout.size != manifest.bytes:
            raise ValueError(f"its tensors take {layout.size} bytes, and it claims {manifest.bytes}")
        delta = self._fetch_delta(manifest)
        self._store.evict(max(1, self._store.keep - 1))  # the one that arrives counts too
        with self._store.begin(manifest.version, cargo.bytes) as arriving:
            holding = Holding(arriving.window(), cargo)
            self._shelf.add(cargo.key, holding)
            try:
                made = delta is not None and self._rebuild(manifest, delta, arriving)
                if made:
                    for chunk in range(cargo.chunks):
                        holding.mark(chunk)
                elif not self._fetch(cargo, holding, arriving):
                    self._resting[manifest.version] = time.monotonic() + PAUSE_S
                    return
                if layout is not None and not layout.describes(arriving.view):
                    raise ValueError("its tensors are not those of its bytes")
                arriving.seal(manifest.blake3)
                self._reserve(cargo.bytes)
                log.info("version %s is here, %s", manifest.version, "by delta" if made else "in full")
            except CorruptVersion as error:
                self.counts.corrupted += 1
                wrong = self._wrong[manifest.blake3] = self._wrong.get(manifest.blake3, 0) + 1
                if wrong >= MAX_WRONG:
                    raise ValueError(f"{error}, {wrong} times") from error
                raise
            finally:
                if not self._holds(manifest.version):
                    self._shelf.remove(cargo.key)

    def _fetch(self, cargo: ChunkedBlob, holding: Holding, arriving: Arriving | None, *, patience: int = 3) -> bool:
        """Pull what is missing, whatever becomes of the chain meanwhile; False if it is given up."""
        self._arriving = (cargo, holding)
        memory = arriving.view if arriving is not None else holding.data
        while not self._closed:
            chain = self._chain
            assert chain is not None
            upstream = upstream_of(chain, self.relay, cargo.chunks)

            def connect(source: int, chain: RelayChain = chain, upstream: Upstream = upstream) -> Peer:
                patient = source in upstream.patient
                if source == OFFERED:
                    return self._offers.peer(cargo, memory, self.receiving)
                link = link_of(chain, source)
                assert link is not None
                ways = (cargo, memory, self.receiving, patient, self._door.tls)
                return dial(link.address, self._run, self._door.token, self.relay, *ways)

            def stop(chain: RelayChain = chain, upstream: Upstream = upstream) -> bool:
                moved = self._moved(chain, upstream, cargo)
                return self._closed or moved or self._superseded(cargo, holding)

            progress = Hashing(cargo, holding, arriving) if arriving is not None else lambda: None
            fetch = Fetch(cargo, holding, upstream.plan, upstream.others, connect, self.counts)
            if fetch.run(stop, progress, patience):
                return True
            if not self._moved(chain, upstream, cargo):
                if arriving is None or holding.empty or holding.idle_s > HOLD_S or self._superseded(cargo, holding):
                    return False
                with self._changed:
                    if self._chain is chain and not self._closed:
                        self._changed.wait(PAUSE_S)
        return False

    def _moved(self, before: RelayChain, upstream: Upstream, cargo: ChunkedBlob) -> bool:
        """Whether others are to be asked now than those of `upstream`, or they are to be found elsewhere."""
        chain = self._chain
        assert chain is not None
        if chain.number == before.number:
            return False
        elsewhere = any(link_of(chain, each) != link_of(before, each) for each in upstream.patient)
        return elsewhere or upstream_of(chain, self.relay, cargo.chunks) != upstream

    def _superseded(self, cargo: ChunkedBlob, holding: Holding) -> bool:
        """Whether a newer version is known while this one does not come on, or nobody speaks of this one any more.

        An older one gives way to the newest at once.
        """
        newest = self._store.newest()
        with self._changed:
            newer = any(version > cargo.version for version in self._known)
            gone = cargo.version not in self._known
            first = newest is not None and cargo.version < newest < max(self._awake(), default=newest)
        return first or ((newer or gone) and holding.idle_s > STALL_S)

    def _fetch_delta(self, manifest: WeightVersion) -> memoryview | None:
        """The delta to this version, if its parent is here and somebody has it; else the full one is fetched."""
        cargo = delta_blob(manifest)
        if cargo is None or manifest.delta is None or cargo.bytes > manifest.bytes:
            return None
        with suppress(StoreError):
            if self._store.seal(manifest.delta.parent).blake3 == manifest.delta.parent_blake3:
                memory = memoryview(bytearray(cargo.bytes))
                holding = Holding(memory, cargo)
                self._shelf.add(cargo.key, holding)
                if self._fetch(cargo, holding, None, patience=1):
                    return memory
                self._shelf.remove(cargo.key)
        return None

    def _rebuild(self, manifest: WeightVersion, delta: memoryview, arriving: Arriving) -> bool:
        """Make the version of its parent; False, having said why, where that gives something else."""
        assert manifest.delta is not None
        try:
            with self._store.read(manifest.delta.parent, manifest.delta.parent_blake3) as parent:
                apply_delta(delta, parent, arriving.view)
            arriving.absorb(arriving.size)
            if arriving.digest() == manifest.blake3:
                return True
            problem = "it makes other bytes than the manifest says"
        except (ValueError, StoreError) as error:
            problem = str(error)
        self.counts.corrupted += 1
        arriving.forget()
        log.warning("the delta of version %s is of no use, the full one is fetched: %s", manifest.version, problem)
        return False

    def _reserve(self, size: int) -> None:
        """Have memory ready for the next version: its first chunks are then passed on at once."""
        with suppress(StoreError):  # the next version needs the room itself, and says so
            self._store.evict()
            self._store.reserve(size)

    def _call_a_lie(self, manifest: WeightVersion, reason: str) -> None:
        with self._changed:
            self._lies.append((manifest, f"the manifest of version {manifest.version} cannot be true: {reason}"))
            if self._known.get(manifest.version) == manifest:
                del self._known[manifest.version]
        self._resting[manifest.version] = time.monotonic() + PAUSE_S


class Hashing:
    """Hashes what arrives, a chunk at each call, where chunks come more slowly than they are hashed.

    Where they do not it would take from them the processor that moves them; the seal then hashes with all of them.
    """

    def __init__(self, cargo: ChunkedBlob, holding: Holding, arriving: Arriving) -> None:
        self._cargo, self._holding, self._arriving = cargo, holding, arriving
        self._takes = 0.0
        self._free_since = 0.0

    def __call__(self) -> None:
        began = time.monotonic()
        if began - self._free_since >= self._takes:
            end = min(prefix_of(self._cargo, self._holding), self._arriving.hashed + self._cargo.chunk_bytes)
            if end > self._arriving.hashed:
                self._arriving.absorb(end)
                self._takes = time.monotonic() - began
        self._free_since = time.monotonic()


def prefix_of(cargo: ChunkedBlob, holding: Holding) -> int:
    """The bytes up to the first chunk that is missing."""
    missing = holding.missing()
    return cargo.span(missing[0]).start if missing else cargo.bytes
