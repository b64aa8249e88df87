"""Length-prefixed JSON: how a worker process and whoever started it talk."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

_LENGTH = struct.Struct(">I")
PREFIX_BYTES = _LENGTH.size


def frame(message: Any) -> bytes:
    """`message` as four bytes of length and JSON. Raises ValueError for NaN and infinities."""
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    return _LENGTH.pack(len(body)) + body


def frame_length(prefix: bytes | bytearray) -> int:
    """The length of the body that follows `prefix`."""
    (length,) = _LENGTH.unpack_from(prefix)
    return int(length)


def read_frame(descriptor: int) -> Any:
    """The next message, waiting for it. Raises EOFError when the writer is gone."""
    return json.loads(_read_exactly(descriptor, frame_length(_read_exactly(descriptor, PREFIX_BYTES))))


def write_frame(descriptor: int, message: Any) -> None:
    """Write `message`, waiting for room. Raises BrokenPipeError when the reader is gone."""
    rest = memoryview(frame(message))
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def take_channels() -> tuple[int, int]:
    """In a worker: where requests come and replies go. Its standard streams lead nowhere from now on, so that nothing
    that is printed mixes with replies."""
    requests, replies = os.dup(0), os.dup(1)
    with open(os.devnull, "r+b", buffering=0) as nowhere:
        for descriptor in (0, 1, 2):
            os.dup2(nowhere.fileno(), descriptor)
    return requests, replies


def _read_exactly(descriptor: int, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = os.read(descriptor, count - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
