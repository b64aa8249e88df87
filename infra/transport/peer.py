"""The client end of a connection: requests several chunks at a time and receives each into its place in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from crc32c import crc32c

from infra.system import SYSTEM, System
from infra.transport.chunked_blob import ChunkedBlob
from infra.transport.connection import Connection, interrupt
from infra.transport.frames import FrameKind, ProtocolError, TransportError, receive, receive_payload, send
from infra.transport.handshake import connect
from infra.transport.throttle import Link
from infra.transport.tls import Tls

CONNECT_S = 2.0
RESPONSE_TIMEOUT_S = 3.0
"""Seconds that a peer may send nothing while a request is pending."""


class BlobAbsent(TransportError):
    """The peer does not have the blob and does not expect it."""


class Peer:
    """One connection over which `blob` is pulled into `memory`, chunk by chunk, through `link`.

    `may_wait`: the peer may wait for chunks that it does not have yet, sending WAIT frames. It fails if the peer sends
    nothing for `RESPONSE_TIMEOUT_S` seconds.
    """

    def __init__(
        self,
        connection: Connection,
        blob: ChunkedBlob,
        memory: memoryview,
        link: Link,
        *,
        may_wait: bool,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_close = on_close
        self._connection, self._blob, self._memory, self._link = connection, blob, memory, link
        self._may_wait = may_wait
        self._pending: deque[tuple[int, int]] = deque()
        connection.settimeout(RESPONSE_TIMEOUT_S)

    @property
    def pending(self) -> list[int]:
        """The chunks that were requested and have not arrived."""
        return [chunk for chunk, _ in self._pending]

    def request(self, chunk: int, turn: int = 0) -> None:
        """Request `chunk`; on a limited link requests with a lower `turn` are served first. Raises PeerGone."""
        span, blob = self._blob.span(chunk), self._blob
        self._pending.append((chunk, turn))
        send(
            self._connection,
            FrameKind.REQUEST,
            version=str(blob.version),
            form=blob.form,
            blake3=blob.blake3,
            start=span.start,
            length=span.stop - span.start,
            may_wait=self._may_wait,
            turn=turn,
        )

    def receive_chunk(self) -> tuple[int, bool]:
        """Receive the next requested chunk into memory; return its index and whether its checksum is correct.

        Raises BlobAbsent, PeerGone, and ProtocolError for any other response.
        """
        frame = receive(self._connection)
        while frame.kind is FrameKind.WAIT:
            frame = receive(self._connection)
        chunk, turn = self._pending[0]
        span = self._blob.span(chunk)
        if frame.kind is FrameKind.ABSENT:
            raise BlobAbsent(f"the peer has no bytes {span.start} to {span.stop} of version {self._blob.version}")
        if frame.kind is not FrameKind.CHUNK or (frame.body.get("start"), frame.payload) != (
            span.start,
            span.stop - span.start,
        ):
            raise ProtocolError(
                f"a {frame.kind.name} frame of {frame.payload} bytes in response to a request of chunk {chunk}"
            )
        place = self._memory[span]
        receive_payload(self._connection, place, self._link, turn)
        self._pending.popleft()
        return chunk, crc32c(place) == self._blob.checks[chunk]

    def interrupt(self) -> None:
        """Shut the connection down, so that a thread that waits for the peer stops waiting."""
        interrupt(self._connection)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
        self._on_close()


def dial(
    address: str,
    run: str,
    token: str,
    relay: int,
    blob: ChunkedBlob,
    memory: memoryview,
    link: Link,
    may_wait: bool,
    tls: Tls | None = None,
    system: System = SYSTEM,
) -> Peer:
    """Connect to the relay at `address`, from which `blob` is pulled. Raises TransportError."""
    connection = connect(address, run, token, relay, CONNECT_S, tls, system)
    return Peer(connection, blob, memory, link, may_wait=may_wait)
