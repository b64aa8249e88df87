"""Frames on a connection: a kind, a small JSON body and a binary payload. Every length is bounded.

A frame is "LMN1", one byte of kind, u32 body length, u64 payload length (big endian), the body, the payload.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

from infra.store.chunks import MAX_CHUNK_BYTES
from infra.transport.connection import Connection
from infra.transport.throttle import Link

_MAGIC = b"LMN1"
_HEADER = struct.Struct("!4sBIQ")
MAX_BODY = 4096
MAX_ARRAY_BYTES = 1 << 30
"""Maximum payload of an ARRAYS frame: the hidden states of one pass, or the KV of one trajectory."""


class TransportError(RuntimeError):
    """A connection can no longer be used."""


class ProtocolError(TransportError):
    """A peer violated the protocol: an invalid frame, a frame that is too large, or one out of sequence."""


class PeerGone(TransportError):
    """A peer closed the connection or sent nothing in time."""


class PeerUnreachable(PeerGone):
    """No connection to a peer's address could be opened."""


class FrameKind(IntEnum):
    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    REFUSED = 4
    REQUEST = 5
    CHUNK = 6
    WAIT = 7
    ABSENT = 8
    OFFER = 9
    STAGE = 10
    STAGE_INPUT = 11
    ARRAYS = 12
    STAGE_WATCH = 13


class Frame(NamedTuple):
    """A frame whose payload of `payload` bytes has not been read yet."""

    kind: FrameKind
    body: dict[str, Any]
    payload: int


def send(connection: Connection, kind: FrameKind, **body: object) -> None:
    """Send a frame without payload. Raises PeerGone."""
    encoded = json.dumps(body, separators=(",", ":")).encode()
    try:
        connection.sendall(_HEADER.pack(_MAGIC, kind, len(encoded), 0) + encoded)
    except OSError as error:
        raise PeerGone(f"{error}") from error


def send_chunk(
    connection: Connection,
    payload: memoryview,
    link: Link,
    turn: int = 0,
    *,
    kind: FrameKind = FrameKind.CHUNK,
    **body: object,
) -> None:
    """Send a frame with `payload` from the memory that holds it, at the rate of `link`. Raises PeerGone.

    The kernel copies it out of mapped memory: with sendfile the receiver takes three times as long on one machine.
    """
    encoded = json.dumps(body, separators=(",", ":")).encode()
    header = _HEADER.pack(_MAGIC, kind, len(encoded), len(payload)) + encoded
    try:
        if type(connection) is socket.socket:  # an SSLSocket takes no flags
            connection.sendall(header, socket.MSG_MORE)
        else:
            connection.sendall(header)
        step = link.max_slice or len(payload)
        for start in range(0, len(payload), step):
            part = payload[start : start + step]
            link.acquire(len(part), turn)
            connection.sendall(part)
    except OSError as error:
        raise PeerGone(f"{error}") from error


def receive(
    connection: Connection, deadline: float | None = None, clock: Callable[[], float] = time.monotonic
) -> Frame:
    """Read the next frame. Raises ProtocolError for an invalid frame, PeerGone for a closed or silent connection.

    With `deadline` (of `clock`) the whole frame must have arrived by then, however slowly its bytes come.
    """
    header = bytearray(_HEADER.size)
    _fill(connection, memoryview(header), deadline, clock)
    magic, number, length, payload = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise ProtocolError(f"not a relay's frame: {bytes(header[:8])!r}")
    most = MAX_ARRAY_BYTES if number == FrameKind.ARRAYS else MAX_CHUNK_BYTES
    if length > MAX_BODY or payload > most:
        raise ProtocolError(f"a frame of {length} + {payload} bytes; the limits are {MAX_BODY} + {most}")
    encoded = bytearray(length)
    _fill(connection, memoryview(encoded), deadline, clock)
    try:
        kind, body = FrameKind(number), json.loads(encoded)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a frame cannot be decoded: {error}") from error
    if not isinstance(body, dict):
        raise ProtocolError(f"the body of a {kind.name} frame is not a JSON object")
    if payload and kind not in (FrameKind.CHUNK, FrameKind.ARRAYS):
        raise ProtocolError(
            f"a {kind.name} frame has a payload of {payload} bytes; only CHUNK frames and ARRAYS have one"
        )
    return Frame(kind, body, payload)


def receive_payload(connection: Connection, memory: memoryview, link: Link, turn: int = 0) -> None:
    """Fill `memory` from the connection, at the rate of `link`. Raises PeerGone."""
    step = link.max_slice or len(memory)
    for start in range(0, len(memory), step):
        part = memory[start : start + step]
        _fill(connection, part)
        link.acquire(len(part), turn)


def _fill(
    connection: Connection,
    memory: memoryview,
    deadline: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    while memory:
        try:
            if deadline is not None:
                if (left := deadline - clock()) <= 0:
                    raise PeerGone("the peer did not send a complete frame in time")
                connection.settimeout(left)
            count = connection.recv_into(memory)
        except TimeoutError as error:
            raise PeerGone("the peer sent nothing in time") from error
        except OSError as error:
            raise PeerGone(f"{error}") from error
        if not count:
            raise PeerGone("the peer closed the connection")
        memory = memory[count:]
