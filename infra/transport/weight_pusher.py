"""Courier: the trainer's way to a master that is not the relay of its own machine.

Where the master stands is placement's to say. As long as it is the trainer's own machine's relay there is nothing to
do: they share memory. Else the courier offers it the newest version, and it pulls that over the same connection.
"""

from __future__ import annotations

import logging
import os
import threading

from infra.runners.liveness import LIVENESS
from infra.store.weight_store import WeightStore
from infra.transport.chunk_registry import ChunkRegistry
from infra.transport.frames import FrameKind, TransportError, receive, send
from infra.transport.handshake import connect, expect
from infra.transport.incoming_pushes import PATIENCE_S
from infra.transport.serving import answer
from infra.transport.throttle import Link
from infra.transport.tls import Tls
from infra.transport.wholes import whole_finder
from schemas.records import PolicyVersion, RelayChain, WeightVersion

log = logging.getLogger(__name__)

RETRY_S = 0.5
CONNECT_S = 3.0


class WeightPusher:
    """Offers what `store` holds to the master of `run`, from a thread of its own."""

    def __init__(
        self,
        store: WeightStore,
        run: str,
        token: str = "",
        link: Link | None = None,
        host: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        self._store, self._run, self._token, self._tls = store, run, token, tls
        self._host = os.uname().nodename if host is None else host
        self._link = link or Link()
        self._shelf = ChunkRegistry(whole_finder(store))
        self._chain: RelayChain | None = None
        self._newest: WeightVersion | None = None
        self._delivered: tuple[str, PolicyVersion] | None = None
        self._told = ""
        self._closed = False
        self._changed = threading.Condition()
        self._thread = LIVENESS.start_thread("courier", self._work)

    @property
    def relays(self) -> int:
        """How many relays there are, as far as placement has said."""
        return 0 if self._chain is None else len(self._chain.links)

    @property
    def master(self) -> str | None:
        """The address of a master that is elsewhere; None while it shares this machine's memory, or there is none."""
        chain = self._chain
        if chain is None or not chain.links:
            return None
        first = chain.links[0]
        return None if (first.host, first.store) == (self._host, str(self._store.root)) else first.address

    def obey(self, chain: RelayChain) -> None:
        """The relays stand like this: the last chain in the log counts, whatever its number."""
        with self._changed:
            if chain != self._chain:
                self._chain = chain
                self._changed.notify_all()

    def announce(self, manifest: WeightVersion) -> None:
        """This version is in the store, and its manifest in the log."""
        with self._changed:
            self._newest = manifest
            self._changed.notify_all()

    def delivered(self, version: PolicyVersion, timeout_s: float) -> bool:
        """Whether the master has `version`, waiting for that: at once where it shares this machine's memory."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self.master is None or self._delivered == (self.master, version), timeout_s
            )

    def close(self) -> None:
        """End; what is under way is given up."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=CONNECT_S + PATIENCE_S)

    def _due(self) -> tuple[str, WeightVersion] | None:
        address, manifest = self.master, self._newest
        if address is None or manifest is None or self._delivered == (address, manifest.version):
            return None
        return address, manifest

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._due() is not None)
                due = self._due()
                if self._closed:
                    return
            assert due is not None
            try:
                self._offer(*due)
                self._told = ""
            except (TransportError, OSError) as error:
                if str(error) != self._told:
                    log.warning("the master at %s does not take version %s: %s", due[0], due[1].version, error)
                    self._told = str(error)
            with self._changed:
                if self._due() is not None and not self._closed:
                    self._changed.wait(RETRY_S)

    def _offer(self, address: str, manifest: WeightVersion) -> None:
        """Offer a version until the master has it. Raises TransportError."""
        with connect(address, self._run, self._token, -1, CONNECT_S, self._tls) as connection:
            connection.settimeout(PATIENCE_S + CONNECT_S)
            send(connection, FrameKind.OFFER, version=str(manifest.version))
            while True:
                frame = receive(connection)
                if frame.kind is FrameKind.REFUSED:
                    with self._changed:
                        self._delivered = (address, manifest.version)
                        self._changed.notify_all()
                    return
                answer(connection, expect(frame, FrameKind.WANT).body, self._shelf, self._link)
