"""Connections over which a trainer pushes its newest version to a master on another machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from infra.transport.chunked_blob import ChunkedBlob
from infra.transport.connection import Connection, interrupt
from infra.transport.frames import FrameKind, ProtocolError, send
from infra.transport.peer import BlobAbsent, Peer
from infra.transport.throttle import Link
from schemas.records import PolicyVersion

OFFER_TIMEOUT_S = 10.0
"""Seconds after which an unused offer is returned to the trainer."""


class IncomingPushes:
    """Offered connections by version, the newest of each. `is_stored` returns whether this machine has a version."""

    def __init__(self, is_stored: Callable[[PolicyVersion], bool]) -> None:
        self._is_stored = is_stored
        self._offers: dict[str, tuple[Connection, threading.Event]] = {}
        self._lock = threading.Lock()

    def accept(self, connection: Connection, body: Mapping[str, Any]) -> None:
        """Hold `connection` until a fetch has used it; refuse it if the version is stored. Raises ProtocolError."""
        try:
            version = PolicyVersion.parse(str(body.get("version"))[:80])
        except ValueError as error:
            raise ProtocolError(f"an offer without a valid version: {error}") from error
        if self._is_stored(version):
            send(connection, FrameKind.REFUSED, reason="already stored")
            return
        done = threading.Event()
        with self._lock:
            before = self._offers.pop(str(version), None)
            self._offers[str(version)] = (connection, done)
        if before is not None:
            before[1].set()
        while not done.wait(OFFER_TIMEOUT_S):
            with self._lock:
                if self._offers.get(str(version), (None, None))[0] is connection:  # no fetch has used it
                    del self._offers[str(version)]
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
