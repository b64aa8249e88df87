"""The server of a relay: authenticated peers of the run request chunks, and each is sent once it is present."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from infra.store.chunks import MAX_CHUNK_BYTES
from infra.system import SYSTEM, System
from infra.transport.chunk_registry import BlobKey, ChunkRegistry
from infra.transport.chunked_blob import FORMS
from infra.transport.connection import Connection, interrupt
from infra.transport.endpoint import Endpoint
from infra.transport.frames import FrameKind, ProtocolError, TransportError, receive, send, send_chunk
from infra.transport.handshake import accept_peer, expect, set_socket_options, token_problem
from infra.transport.throttle import Link

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
"""Maximum of authenticated connections."""
MAX_UNAUTHENTICATED = 64
"""Maximum of unauthenticated connections: a new one replaces the oldest of the address that has most."""
WAIT_FRAME_EVERY_S = 0.5
"""Seconds between the WAIT frames sent to a peer whose chunk has not arrived."""
STALL_S = 5.0
"""Seconds without progress of a version after which the response is ABSENT."""
ACCEPT_AGAIN_S = 0.1
"""Seconds after a failed accept."""
UNKNOWN_TIMEOUT_S = 1.0
"""Seconds to wait for an unknown version before the response is ABSENT."""

Handler = Callable[[Connection, Mapping[str, Any]], None]
"""Takes over a connection whose first frame has the given body; the connection is closed when it returns."""


@dataclass(eq=False)
class _Client:
    """A connection and the address of its client."""

    connection: Connection
    address: str


class Server:
    """Serves the blobs in `registry` at `endpoint` to peers of `run` that know its token.

    All data is sent through `link`. A connection whose first frame is of a kind in `handlers` is handed to its handler:
    a trainer offers a version, or a stage of a group begins. The response for a version without progress for `STALL_S`
    seconds is ABSENT. With TLS peers must connect over TLS with a certificate of the run's authority. Raises
    ValueError for an empty or short token.
    """

    def __init__(
        self,
        registry: ChunkRegistry,
        run: str,
        endpoint: Endpoint,
        link: Link,
        handlers: Mapping[FrameKind, Handler],
        system: System = SYSTEM,
    ) -> None:
        if problem := token_problem(endpoint.token):
            raise ValueError(problem)
        self._registry, self._run, self._link, self._handlers = registry, run, link, handlers
        self._token, self._tls, self._system = endpoint.token, endpoint.tls, system
        self._lock = threading.Lock()
        self._unauthenticated: list[_Client] = []  # oldest first
        self._peers: set[_Client] = set()
        self._closed = False
        self._listening = system.listen(endpoint.host, endpoint.port, MAX_CONNECTIONS)
        self.port: int = self._listening.port
        self._connections = 0
        self._thread = system.start_thread("relay server", self._accept, vital=True)

    def close(self) -> None:
        """Stop listening and close every connection."""
        with self._lock:
            self._closed = True
            clients = [*self._unauthenticated, *self._peers]
        self._listening.close()
        for client in clients:
            interrupt(client.connection)
        self._thread.join(timeout=5)

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listening.accept()
            except OSError as error:
                with self._lock:
                    if self._closed:
                        return
                log.warning("a connection was not accepted: %s", error)  # the client left, or too many files are open
                self._system.sleep(ACCEPT_AGAIN_S)
                continue
            client = _Client(connection, address)
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
                    interrupt(self._drop_oldest().connection)
                self._unauthenticated.append(client)
            self._connections += 1
            self._system.start_thread(f"relay peer {self._connections}", partial(self._serve, client))

    def _drop_oldest(self) -> _Client:
        """Remove and return the oldest connection of the busiest address, so that one client cannot block others."""
        most, _ = Counter(client.address for client in self._unauthenticated).most_common(1)[0]
        oldest = next(client for client in self._unauthenticated if client.address == most)
        self._unauthenticated.remove(oldest)
        return oldest

    def _serve(self, client: _Client) -> None:
        try:
            set_socket_options(client.connection)
            if self._tls is not None:
                with self._lock:  # `close` must find the connection that is in use
                    client.connection = self._tls.wrap_server(client.connection)
            connection = accept_peer(
                client.connection,
                self._run,
                self._token,
                admit=lambda: self._admit(client),
                clock=self._system.monotonic,
            )
            frame = receive(connection)
            handler = self._handlers.get(frame.kind)
            if handler is not None:
                handler(connection, frame.body)
                return
            while True:
                serve_request(connection, expect(frame, FrameKind.REQUEST).body, self._registry, self._link)
                frame = receive(connection)
        except ProtocolError as error:
            log.warning("a peer is disconnected: %s", error)
        except (TransportError, OSError) as error:
            log.debug("a connection has ended: %s", error)
        finally:
            with self._lock:
                self._peers.discard(client)
                if client in self._unauthenticated:
                    self._unauthenticated.remove(client)
            client.connection.close()

    def _admit(self, client: _Client) -> bool:
        """Whether another authenticated connection is accepted; records it if so."""
        with self._lock:
            if len(self._peers) >= MAX_CONNECTIONS or client not in self._unauthenticated:
                return False
            self._unauthenticated.remove(client)
            self._peers.add(client)
            return True


def serve_request(connection: Connection, body: Mapping[str, Any], registry: ChunkRegistry, link: Link) -> None:
    """Respond to one REQUEST: with the chunk once it is present, or with ABSENT if it is not expected.

    Raises ProtocolError for an invalid request, PeerGone.
    """
    key, span, may_wait, turn = parse_request(body)
    buffer = registry.wait(key, UNKNOWN_TIMEOUT_S if may_wait else 0.0)
    while buffer is not None:
        present = buffer.wait(span, WAIT_FRAME_EVERY_S if may_wait else 0.0)
        if present:
            if span.stop > len(buffer.data):
                raise ProtocolError(f"a REQUEST of bytes {span.start} to {span.stop} of {len(buffer.data)}")
            send_chunk(connection, buffer.data[span], link, turn, start=span.start)
            return
        if present is None or not may_wait or buffer.idle_s > STALL_S:
            break
        send(connection, FrameKind.WAIT)
    send(connection, FrameKind.ABSENT, start=span.start)


def parse_request(body: Mapping[str, Any]) -> tuple[BlobKey, slice, bool, int]:
    version, form, blake3 = (body.get(name) for name in ("version", "form", "blake3"))
    start, length = body.get("start"), body.get("length")
    if not (isinstance(version, str) and isinstance(blake3, str) and isinstance(form, str)):
        raise ProtocolError("a REQUEST without version, form or blake3")
    if form not in FORMS:
        raise ProtocolError(f"a REQUEST of unknown form {form[:20]!r}, it must be one of {', '.join(FORMS)}")
    if not (isinstance(start, int) and isinstance(length, int) and start >= 0 and 0 < length <= MAX_CHUNK_BYTES):
        raise ProtocolError(f"a REQUEST of {length!r} bytes from {start!r}")
    turn = body.get("turn")
    may_wait, turn = body.get("may_wait") is True, turn if isinstance(turn, int) else 0
    return (version, form, blake3), slice(start, start + length), may_wait, turn
