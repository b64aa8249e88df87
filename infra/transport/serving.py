"""A relay's open door: whoever proves to be of the run asks for chunks, and gets each as soon as it is there."""

from __future__ import annotations

import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from infra.runners.liveness import LIVENESS
from infra.store.chunks import MAX_CHUNK_BYTES
from infra.transport.chunk_registry import ChunkRegistry, Holding, Key
from infra.transport.chunked_blob import FORMS
from infra.transport.frames import FrameKind, ProtocolError, TransportError, interrupt, receive, send, send_chunk
from infra.transport.handshake import expect, tune, welcome
from infra.transport.throttle import Link
from infra.transport.tls import Tls

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
"""Peers that have proved to be of the run, at once."""
MAX_STRANGERS = 64
"""Connections that have proved nothing yet, at once: the oldest of the busiest address gives way to a new one."""
WAIT_S = 0.5
"""How often whoever waits for a chunk hears that it is waited for."""
UNKNOWN_S = 1.0
"""How long a version may be unknown here before whoever patiently wants it is sent elsewhere."""

Offered = Callable[[socket.socket, Mapping[str, Any]], None]


@dataclass(eq=False)
class _Caller:
    """A connection and where it comes from."""

    connection: socket.socket
    address: str


class Server:
    """Hands out what is on `shelf` at `host`:`port` (0: any free one) to peers of `run` that know its `token`.

    What is sent passes through `link`. `offered(connection, body)` takes over a connection over which a trainer offers
    a version. A version that makes no progress for `stall_s` seconds is answered with "absent". With `tls` peers come
    over TLS, each with a certificate of the run's authority.
    """

    def __init__(
        self,
        shelf: ChunkRegistry,
        run: str,
        token: str,
        link: Link,
        offered: Offered | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        stall_s: float = 5.0,
        tls: Tls | None = None,
    ) -> None:
        self._tls = tls
        self._shelf, self._run, self._token, self._link, self._offered = shelf, run, token, link, offered
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._strangers: list[_Caller] = []  # in the order in which they came
        self._peers: set[_Caller] = set()
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        self.port: int = self._listening.getsockname()[1]
        self._thread = LIVENESS.start_thread("relay door", self._accept)

    def close(self) -> None:
        """Close the door, and every connection that came through it."""
        with self._lock:
            self._closed = True
            callers = [*self._strangers, *self._peers]
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for caller in callers:
            interrupt(caller.connection)
        self._thread.join(timeout=5)

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listening.accept()
            except OSError:
                return
            caller = _Caller(connection, str(address[0]))
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                if len(self._strangers) >= MAX_STRANGERS:
                    interrupt(self._crowded_out().connection)
                self._strangers.append(caller)
            name = f"relay peer {connection.fileno()}"
            threading.Thread(target=self._attend, args=(caller,), name=name, daemon=True).start()

    def _crowded_out(self) -> _Caller:
        """The stranger that gives way: who opens many connections loses its own, and others are let in."""
        most, _ = Counter(caller.address for caller in self._strangers).most_common(1)[0]
        oldest = next(caller for caller in self._strangers if caller.address == most)
        self._strangers.remove(oldest)
        return oldest

    def _attend(self, caller: _Caller) -> None:
        try:
            tune(caller.connection)
            if self._tls is not None:
                with self._lock:  # whoever interrupts it must find the connection that is in use
                    caller.connection = self._tls.accept(caller.connection)
            connection = caller.connection
            welcome(connection, self._run, self._token, admit=lambda: self._admit(caller))
            frame = receive(connection)
            if frame.kind is FrameKind.OFFER and self._offered is not None:
                self._offered(connection, frame.body)
                return
            while True:
                answer(connection, expect(frame, FrameKind.WANT).body, self._shelf, self._link, self._stall_s)
                frame = receive(connection)
        except ProtocolError as error:
            log.warning("a peer is sent away: %s", error)
        except (TransportError, OSError) as error:
            log.debug("a connection ends: %s", error)
        finally:
            with self._lock:
                self._peers.discard(caller)
                if caller in self._strangers:
                    self._strangers.remove(caller)
            caller.connection.close()

    def _admit(self, caller: _Caller) -> bool:
        """Whether there is room for a peer that has proved to be one."""
        with self._lock:
            if len(self._peers) >= MAX_CONNECTIONS or caller not in self._strangers:
                return False
            self._strangers.remove(caller)
            self._peers.add(caller)
            return True


def answer(
    connection: socket.socket, body: Mapping[str, Any], shelf: ChunkRegistry, link: Link, stall_s: float = 5.0
) -> None:
    """Answer one WANT: with the chunk once it is there, or with ABSENT where it is not to be expected.

    Raises ProtocolError for a question that makes no sense, PeerGone.
    """
    key, span, patient, turn = _wanted(body)
    holding = shelf.wait(key, UNKNOWN_S if patient else 0.0)
    while holding is not None:
        there = holding.wait(span, WAIT_S if patient else 0.0)
        if there:
            if span.stop > len(holding.data):
                raise ProtocolError(f"bytes {span.start} to {span.stop} of {len(holding.data)}")
            send_chunk(connection, holding.data[span], link, turn, start=span.start)
            return
        if there is None or not patient or _stalls(holding, stall_s):
            break
        send(connection, FrameKind.WAIT)
    send(connection, FrameKind.ABSENT, start=span.start)


def _stalls(holding: Holding, stall_s: float) -> bool:
    return holding.idle_s > stall_s


def _wanted(body: Mapping[str, Any]) -> tuple[Key, slice, bool, int]:
    version, form, blake3 = (body.get(name) for name in ("version", "form", "blake3"))
    start, length = body.get("start"), body.get("length")
    if not (isinstance(version, str) and isinstance(blake3, str) and isinstance(form, str)):
        raise ProtocolError("a WANT that does not say of what")
    if form not in FORMS:
        raise ProtocolError(f"a WANT of a {form[:20]!r}")
    if not (isinstance(start, int) and isinstance(length, int) and start >= 0 and 0 < length <= MAX_CHUNK_BYTES):
        raise ProtocolError(f"a WANT of {length!r} bytes from {start!r}")
    turn = body.get("turn")
    patient, turn = body.get("patient") is True, turn if isinstance(turn, int) else 0
    return (version, form, blake3), slice(start, start + length), patient, turn
