"""Length-prefixed JSON: the protocol between a worker process and its parent."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

_LENGTH = struct.Struct(">I")
PREFIX_BYTES = _LENGTH.size


def frame(message: Any) -> bytes:
    """Encode `message` as JSON with a length of four bytes before it. Raises ValueError for NaN and infinities."""
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    return _LENGTH.pack(len(body)) + body


def frame_length(prefix: bytes | bytearray) -> int:
    """The length of the body that follows `prefix`."""
    (length,) = _LENGTH.unpack_from(prefix)
    return int(length)


def read_frame(descriptor: int) -> Any:
    """Wait for the next message and return it. Raises EOFError when the writer has closed the channel."""
    return json.loads(_read_exactly(descriptor, frame_length(_read_exactly(descriptor, PREFIX_BYTES))))


def write_frame(descriptor: int, message: Any) -> None:
    """Write `message`, blocking while the pipe is full. Raises BrokenPipeError when the reader has closed it."""
    rest = memoryview(frame(message))
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def take_channels() -> tuple[int, int]:
    """In a worker: return the descriptors of requests and replies, and redirect the standard streams to /dev/null.

    So printed text cannot mix with replies.
    """
    requests, replies = os.dup(0), os.dup(1)
    with open(os.devnull, "r+b", buffering=0) as null:
        for descriptor in (0, 1, 2):
            os.dup2(null.fileno(), descriptor)
    return requests, replies


def _read_exactly(descriptor: int, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = os.read(descriptor, count - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
