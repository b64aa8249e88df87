"""The asking end of a connection: wants chunks, several at a time, and takes each into the memory it belongs in."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable

from crc32c import crc32c

from infra.transport.chunked_blob import ChunkedBlob
from infra.transport.frames import FrameKind, ProtocolError, TransportError, interrupt, receive, receive_payload, send
from infra.transport.handshake import connect
from infra.transport.throttle import Link
from infra.transport.tls import Tls

CONNECT_S = 2.0
SILENCE_S = 3.0
"""How long a peer that has been asked may say nothing at all."""


class Absent(TransportError):
    """The peer does not have it, and does not expect it."""


class Peer:
    """One connection from which `cargo` is pulled into `memory`, chunk by chunk, through `link`.

    `patient`: the peer may wait for what it does not have yet. Between any two words of it at most `silence_s` pass.
    """

    def __init__(
        self,
        connection: socket.socket,
        cargo: ChunkedBlob,
        memory: memoryview,
        link: Link,
        *,
        patient: bool,
        silence_s: float = SILENCE_S,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_close = on_close
        self._connection, self._cargo, self._memory, self._link = connection, cargo, memory, link
        self._patient = patient
        self._asked: deque[tuple[int, int]] = deque()
        connection.settimeout(silence_s)

    @property
    def asked(self) -> list[int]:
        """The chunks that were asked for and have not come."""
        return [chunk for chunk, _ in self._asked]

    def ask(self, chunk: int, turn: int = 0) -> None:
        """Ask for `chunk`, which comes before those of a later `turn` where a link is not for all. Raises PeerGone."""
        span, cargo = self._cargo.span(chunk), self._cargo
        self._asked.append((chunk, turn))
        send(
            self._connection,
            FrameKind.WANT,
            version=str(cargo.version),
            form=cargo.form,
            blake3=cargo.blake3,
            start=span.start,
            length=span.stop - span.start,
            patient=self._patient,
            turn=turn,
        )

    def take(self) -> tuple[int, bool]:
        """The next chunk that was asked for, now in memory, and whether it is what it should be.

        Raises Absent, PeerGone, and ProtocolError for an answer to something else.
        """
        frame = receive(self._connection)
        while frame.kind is FrameKind.WAIT:
            frame = receive(self._connection)
        chunk, turn = self._asked[0]
        span = self._cargo.span(chunk)
        if frame.kind is FrameKind.ABSENT:
            raise Absent(f"it has no bytes {span.start} to {span.stop} of version {self._cargo.version}")
        if frame.kind is not FrameKind.CHUNK or (frame.body.get("start"), frame.payload) != (
            span.start,
            span.stop - span.start,
        ):
            raise ProtocolError(f"a {frame.kind.name} of {frame.payload} bytes where a chunk was asked for")
        place = self._memory[span]
        receive_payload(self._connection, place, self._link, turn)
        self._asked.popleft()
        return chunk, crc32c(place) == self._cargo.checks[chunk]

    def interrupt(self) -> None:
        """Make whoever waits for the peer stop waiting."""
        interrupt(self._connection)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
        self._on_close()


def dial(
    address: str,
    run: str,
    token: str,
    me: int,
    cargo: ChunkedBlob,
    memory: memoryview,
    link: Link,
    patient: bool,
    tls: Tls | None = None,
) -> Peer:
    """A connection to the relay at `address` from which `cargo` is pulled. Raises TransportError."""
    return Peer(connect(address, run, token, me, CONNECT_S, tls), cargo, memory, link, patient=patient)
