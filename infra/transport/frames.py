"""Frames on a connection: a kind, a small JSON body, and bytes that go from memory to memory. Every length is bounded.

A frame is "LMN1", one byte of kind, u32 body length, u64 payload length (big endian), the body, the payload.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
import time
from contextlib import suppress
from enum import IntEnum
from typing import Any, NamedTuple

from infra.store.chunks import MAX_CHUNK_BYTES
from infra.transport.throttle import Link

_MAGIC = b"LMN1"
_HEADER = struct.Struct("!4sBIQ")
MAX_BODY = 4096


class TransportError(RuntimeError):
    """A connection is of no use any more."""


class ProtocolError(TransportError):
    """A peer said what no relay says: garbage, too much, or out of turn."""


class PeerGone(TransportError):
    """A peer closed the connection, or is silent."""


class FrameKind(IntEnum):
    """What a frame is."""

    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    REFUSED = 4
    WANT = 5
    CHUNK = 6
    WAIT = 7
    ABSENT = 8
    OFFER = 9


class Frame(NamedTuple):
    """A frame whose payload, if it has one, is still to be read."""

    kind: FrameKind
    body: dict[str, Any]
    payload: int


def send(connection: socket.socket, kind: FrameKind, **body: object) -> None:
    """Send a frame without payload. Raises PeerGone."""
    text = json.dumps(body, separators=(",", ":")).encode()
    try:
        connection.sendall(_HEADER.pack(_MAGIC, kind, len(text), 0) + text)
    except OSError as error:
        raise PeerGone(f"{error}") from error


def send_chunk(connection: socket.socket, payload: memoryview, link: Link, turn: int = 0, **body: object) -> None:
    """Send `payload` out of the memory where it lies, at the pace of `link`. Raises PeerGone.

    The kernel copies it out of mapped memory. By sendfile the other end takes in three times as long on one machine.
    """
    text = json.dumps(body, separators=(",", ":")).encode()
    head = _HEADER.pack(_MAGIC, FrameKind.CHUNK, len(text), len(payload)) + text
    try:
        if isinstance(connection, ssl.SSLSocket):
            connection.sendall(head)
        else:
            connection.sendall(head, socket.MSG_MORE)
        step = link.slice or len(payload)
        for at in range(0, len(payload), step):
            part = payload[at : at + step]
            link.take(len(part), turn)
            connection.sendall(part)
    except OSError as error:
        raise PeerGone(f"{error}") from error


def receive(connection: socket.socket, deadline: float | None = None) -> Frame:
    """The next frame. Raises ProtocolError for what is none, PeerGone for a closed or silent connection.

    With `deadline`, of `time.monotonic`, the whole frame must be here by then, however its bytes drip in.
    """
    head = bytearray(_HEADER.size)
    _fill(connection, memoryview(head), deadline)
    magic, number, length, payload = _HEADER.unpack(head)
    if magic != _MAGIC:
        raise ProtocolError(f"not a relay's frame: {bytes(head[:8])!r}")
    if length > MAX_BODY or payload > MAX_CHUNK_BYTES:
        raise ProtocolError(f"a frame of {length} + {payload} bytes; bounds are {MAX_BODY} + {MAX_CHUNK_BYTES}")
    text = bytearray(length)
    _fill(connection, memoryview(text), deadline)
    try:
        kind, body = FrameKind(number), json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a frame that cannot be read: {error}") from error
    if not isinstance(body, dict):
        raise ProtocolError(f"the body of a {kind.name} is no object")
    if payload and kind is not FrameKind.CHUNK:
        raise ProtocolError(f"a {kind.name} with a payload")
    return Frame(kind, body, payload)


def receive_payload(connection: socket.socket, memory: memoryview, link: Link, turn: int = 0) -> None:
    """Fill `memory` from the connection, at the pace of `link`. Raises PeerGone."""
    step = link.slice or len(memory)
    for start in range(0, len(memory), step):
        part = memory[start : start + step]
        _fill(connection, part)
        link.take(len(part), turn)


def interrupt(connection: socket.socket) -> None:
    """Make whoever waits for `connection`, in another thread, stop waiting; it is of no use any more."""
    with suppress(OSError):
        # Not SSLSocket's own, after which the other thread would read the bytes of the wire as if they were ours.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _fill(connection: socket.socket, memory: memoryview, deadline: float | None = None) -> None:
    while memory:
        try:
            if deadline is not None:
                if (left := deadline - time.monotonic()) <= 0:
                    raise PeerGone("the peer takes too long")
                connection.settimeout(left)
            count = connection.recv_into(memory)
        except TimeoutError as error:
            raise PeerGone("the peer is silent") from error
        except OSError as error:
            raise PeerGone(f"{error}") from error
        if not count:
            raise PeerGone("the peer closed the connection")
        memory = memory[count:]
