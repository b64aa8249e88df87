"""Connections over which a trainer offers its newest version to a master that is not on its machine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from infra.transport.chunked_blob import ChunkedBlob
from infra.transport.frames import FrameKind, ProtocolError, interrupt, send
from infra.transport.peer import Absent, Peer
from infra.transport.throttle import Link
from schemas.records import PolicyVersion

PATIENCE_S = 10.0
"""How long an offer may lie there before it is given back."""


class IncomingPushes:
    """Offers by version, the newest of each counting. `holds` says whether a version is here already."""

    def __init__(self, holds: Callable[[PolicyVersion], bool]) -> None:
        self._holds = holds
        self._lying: dict[str, tuple[socket.socket, threading.Event]] = {}
        self._lock = threading.Lock()

    def take(self, connection: socket.socket, body: Mapping[str, Any]) -> None:
        """Keep `connection` until somebody has pulled over it; at once if the version is here. Raises ProtocolError."""
        try:
            version = PolicyVersion.parse(str(body.get("version"))[:80])
        except ValueError as error:
            raise ProtocolError(f"an offer of nothing: {error}") from error
        if self._holds(version):
            send(connection, FrameKind.REFUSED, reason="held")
            return
        done = threading.Event()
        with self._lock:
            before = self._lying.pop(str(version), None)
            self._lying[str(version)] = (connection, done)
        if before is not None:
            before[1].set()
        while not done.wait(PATIENCE_S):
            with self._lock:
                if self._lying.get(str(version), (None, None))[0] is connection:  # nobody came for it
                    del self._lying[str(version)]
                    return

    def peer(self, cargo: ChunkedBlob, memory: memoryview, link: Link) -> Peer:
        """A peer over the offer of this cargo's version. Raises Absent where nobody offers it."""
        with self._lock:
            offer = self._lying.pop(str(cargo.version), None)
        if offer is None:
            raise Absent(f"nobody offers version {cargo.version}")
        connection, done = offer
        return Peer(connection, cargo, memory, link, patient=False, on_close=done.set)

    def close(self) -> None:
        """Give all of them back."""
        with self._lock:
            lying, self._lying = list(self._lying.values()), {}
        for connection, done in lying:
            interrupt(connection)
            done.set()
