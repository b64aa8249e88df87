"""WeightPusher: delivers the trainer's newest version to a master relay on another machine.

Placement decides which relay is the master. If it is the relay of the trainer's machine, nothing is sent: they share
memory. Otherwise the pusher offers the newest version, and the master, which holds the offered connection
(`IncomingPushes`), pulls it over the same connection.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from infra.machine import machine_name
from infra.store.weight_store import WeightStore
from infra.system import SYSTEM, Event, System
from infra.transport.chunk_registry import ChunkRegistry, store_lookup
from infra.transport.chunked_blob import ChunkedBlob
from infra.transport.connection import Connection, interrupt
from infra.transport.frames import FrameKind, PeerGone, ProtocolError, TransportError, receive, send
from infra.transport.handshake import connect, expect
from infra.transport.peer import BlobAbsent, Peer
from infra.transport.serving import serve_request
from infra.transport.throttle import Link
from infra.transport.tls import Tls
from schemas.records import PolicyVersion, RelayChain, WeightVersion

log = logging.getLogger(__name__)

RETRY_S = 0.5
CONNECT_S = 3.0
OFFER_AGAIN_S = 30.0
"""Seconds after which a delivered version is offered again: the master may have lost its memory and be back at the same
address."""


class WeightPusher:
    """Offers the versions in `store` to the master of `run`, in a thread of its own."""

    def __init__(
        self,
        store: WeightStore,
        run: str,
        token: str = "",
        link: Link | None = None,
        host: str | None = None,
        tls: Tls | None = None,
        system: System = SYSTEM,
    ) -> None:
        self._system = system
        self._store, self._run, self._token, self._tls = store, run, token, tls
        self._host = machine_name() if host is None else host
        self._link = link or Link()
        self._chain: RelayChain | None = None
        self._newest: WeightVersion | None = None
        self._delivered: tuple[str, PolicyVersion] | None = None
        self._offer_again_at = 0.0
        self._connection: Connection | None = None
        self._unused_offer: tuple[str, WeightVersion] | None = None
        """The address and the manifest of the offer on `_connection`; None once the master has asked for a chunk."""
        self._last_error = ""
        self._closed = False
        self._changed = system.condition()
        self._thread = system.start_thread("weight pusher", self._run_pushes, vital=True)

    @property
    def relays(self) -> int:
        """The number of relays in the current chain."""
        return 0 if self._chain is None else len(self._chain.links)

    @property
    def master(self) -> str | None:
        """The address of a master on another machine; None if it shares this machine's memory or there is no master."""
        chain = self._chain
        if chain is None or not chain.links:
            return None
        first = chain.links[0]
        return None if (first.host, first.store) == (self._host, str(self._store.root)) else first.address

    def set_chain(self, chain: RelayChain) -> None:
        """Use `chain` from now on: the last chain in the log counts, whatever its number."""
        with self._changed:
            if chain != self._chain:
                self._chain = chain
                self._withdraw_offer()
                self._changed.notify_all()

    def announce(self, manifest: WeightVersion) -> None:
        """Deliver this version: it is in the store, and its manifest is in the log."""
        with self._changed:
            self._newest = manifest
            self._withdraw_offer()
            self._changed.notify_all()

    def wait_delivered(self, version: PolicyVersion, timeout_s: float) -> bool:
        """Wait until the master has `version` and return whether it has; at once if it shares this machine's memory."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self.master is None or self._delivered == (self.master, version), timeout_s
            )

    def close(self) -> None:
        """Stop the thread; a push under way is aborted."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._connection is not None:
                interrupt(self._connection)
        self._thread.join(timeout=CONNECT_S + OFFER_TIMEOUT_S)

    def _withdraw_offer(self) -> None:
        """End an unused offer of an older version or to an earlier master, who may never ask for it."""
        if self._unused_offer not in (None, (self.master, self._newest)) and self._connection is not None:
            interrupt(self._connection)

    def _next_push(self) -> tuple[str, WeightVersion] | None:
        address, manifest = self.master, self._newest
        if address is None or manifest is None:
            return None
        delivered = self._delivered == (address, manifest.version)
        return None if delivered and self._system.monotonic() < self._offer_again_at else (address, manifest)

    def _run_pushes(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._next_push() is not None, OFFER_AGAIN_S)
                push = self._next_push()
                if self._closed:
                    return
                if push is None:
                    continue
            try:
                self._push(*push)
                self._last_error = ""
            except (TransportError, OSError) as error:
                if str(error) != self._last_error and not self._closed:
                    log.warning("the master at %s did not accept version %s: %s", push[0], push[1].version, error)
                    self._last_error = str(error)
            with self._changed:
                self._offer_again_at = self._system.monotonic() + OFFER_AGAIN_S
                if self._next_push() == push and not self._closed:
                    self._changed.wait(RETRY_S)

    def _push(self, address: str, manifest: WeightVersion) -> None:
        """Offer a version and serve requests until the master has it or ends its fetch. Raises TransportError."""
        # Of this push alone, since a registry keeps mapped what it has served.
        registry = ChunkRegistry(store_lookup(self._store), self._system)
        requests = 0
        with connect(address, self._run, self._token, -1, CONNECT_S, self._tls, self._system) as connection:
            connection.settimeout(OFFER_TIMEOUT_S + CONNECT_S)
            with self._changed:
                if self._closed or (self.master, self._newest) != (address, manifest):
                    return
                self._connection, self._unused_offer = connection, (address, manifest)
            try:
                send(connection, FrameKind.OFFER, version=str(manifest.version))
                while (frame := receive(connection)).kind is not FrameKind.REFUSED:
                    with self._changed:
                        self._delivered = self._unused_offer = None  # the master lacks it, and asks for it
                    serve_request(connection, expect(frame, FrameKind.REQUEST).body, registry, self._link)
                    requests += 1
            except PeerGone as error:
                if not requests and (self.master, self._newest) == (address, manifest):
                    raise
                log.debug("the master at %s has ended its fetch of version %s: %s", address, manifest.version, error)
                return
            finally:
                with self._changed:
                    self._connection = self._unused_offer = None
        with self._changed:
            self._delivered = (address, manifest.version)
            self._changed.notify_all()


OFFER_TIMEOUT_S = 10.0
"""Seconds after which an unused offer is returned to the trainer."""
CHECK_S = 0.25
"""Seconds after which an unused offer is refused, once its version is stored."""


class IncomingPushes:
    """Offered connections by version, the newest of each. `is_stored` returns whether this machine has a version."""

    def __init__(self, is_stored: Callable[[PolicyVersion], bool], system: System = SYSTEM) -> None:
        self._is_stored, self._system = is_stored, system
        self._offers: dict[str, tuple[Connection, Event]] = {}
        self._lock = threading.Lock()

    def accept(self, connection: Connection, body: Mapping[str, Any]) -> None:
        """Hold `connection` until a fetch has used it; refuse it once the version is stored. Raises ProtocolError."""
        try:
            version = PolicyVersion.parse(str(body.get("version"))[:80])
        except ValueError as error:
            raise ProtocolError(f"an offer without a valid version: {error}") from error
        if self._is_stored(version):
            send(connection, FrameKind.REFUSED, reason="already stored")
            return
        done = self._system.event()
        with self._lock:
            before = self._offers.pop(str(version), None)
            self._offers[str(version)] = (connection, done)
        if before is not None:
            before[1].set()
        until = self._system.monotonic() + OFFER_TIMEOUT_S
        while not done.wait(CHECK_S):
            stored = self._is_stored(version)
            with self._lock:
                if self._offers.get(str(version), (None, None))[0] is not connection:  # a fetch uses it
                    continue
                if not stored and self._system.monotonic() < until:
                    continue
                del self._offers[str(version)]
            if stored:
                send(connection, FrameKind.REFUSED, reason="already stored")
            return

    def peer(self, blob: ChunkedBlob, memory: memoryview, link: Link) -> Peer:
        """Return a peer over the offered connection of this blob's version. Raises BlobAbsent if there is none."""
        with self._lock:
            offer = self._offers.pop(str(blob.version), None)
        if offer is None:
            raise BlobAbsent(f"no trainer offers version {blob.version}")
        connection, done = offer
        return Peer(connection, blob, memory, link, may_wait=False, on_close=done.set)

    def close(self) -> None:
        """Close all offered connections."""
        with self._lock:
            offers, self._offers = list(self._offers.values()), {}
        for connection, done in offers:
            interrupt(connection)
            done.set()
