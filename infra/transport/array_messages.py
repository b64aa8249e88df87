"""Messages with arrays on a connection: a kind, a small JSON body, and numpy arrays as their plain bytes.

A message is one ARRAYS frame. Its payload begins with a JSON list of each array's dtype and shape; the arrays follow,
without padding. Every length is bounded before memory is allocated, and only numbers are read, no objects.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import Buffer

from infra.transport.connection import Connection
from infra.transport.frames import FrameKind, ProtocolError, receive, receive_payload, send_chunk
from infra.transport.handshake import expect
from infra.transport.throttle import Link

_DTYPES = ("uint8", "int64")
_MAX_LIST = 1 << 20
_MAX_DIMENSIONS = 4


class ArrayMessage(NamedTuple):
    """A received message."""

    kind: str
    body: dict[str, Any]
    arrays: list[np.ndarray]


def send_message(connection: Connection, link: Link, kind: str, arrays: Sequence[np.ndarray] = (), **body: Any) -> None:
    """Send a message of `kind` with `arrays`, uint8 or int64, at the rate of `link`. Raises PeerGone."""
    listed = json.dumps([[str(array.dtype), array.shape] for array in arrays], separators=(",", ":")).encode()
    parts: list[Buffer] = [listed, *(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays)]
    payload = memoryview(bytearray().join(parts))
    send_chunk(connection, payload, link, kind=FrameKind.ARRAYS, message=kind, listed=len(listed), **body)


def receive_message(connection: Connection, link: Link, max_bytes: int) -> ArrayMessage:
    """Receive a message of at most `max_bytes`. Raises ProtocolError for an invalid one, PeerGone."""
    frame = expect(receive(connection), FrameKind.ARRAYS)
    listed, kind = frame.body.pop("listed", None), frame.body.pop("message", None)
    if frame.payload > max_bytes:
        raise ProtocolError(f"a message of {frame.payload} bytes; at most {max_bytes} are accepted")
    if not isinstance(kind, str) or not isinstance(listed, int) or not 2 <= listed <= min(frame.payload, _MAX_LIST):
        raise ProtocolError("a message without a kind or a list of its arrays")
    memory = memoryview(bytearray(frame.payload))
    receive_payload(connection, memory, link)
    return ArrayMessage(kind, frame.body, _arrays(bytes(memory[:listed]), memory[listed:]))


def _arrays(listed: bytes, data: memoryview) -> list[np.ndarray]:
    try:
        shapes = [(str(dtype), tuple(shape)) for dtype, shape in json.loads(listed)]
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"the list of a message's arrays cannot be decoded: {error}") from error
    found, at = [], 0
    for dtype, shape in shapes:
        valid = dtype in _DTYPES and len(shape) <= _MAX_DIMENSIONS and all(type(n) is int and n >= 0 for n in shape)
        end = at + prod(shape) * np.dtype(dtype).itemsize if valid else -1
        if not 0 <= end <= len(data):
            raise ProtocolError(f"a message lists an array of {dtype[:20]} {str(shape)[:40]}, which it does not hold")
        try:
            found.append(np.frombuffer(data[at:end], dtype).reshape(shape))
        except ValueError as error:  # no bytes, but dimensions beyond all memory
            raise ProtocolError(f"a message lists an array of shape {str(shape)[:40]}: {error}") from error
        at = end
    if at != len(data):
        raise ProtocolError(f"a message has {len(data) - at} bytes that belong to no array")
    return found
