"""kafka-python reads its sockets 4 KB at a time, and gives the interpreter up for each.

A fetch of a megabyte takes it 270 times, and beside a thread that computes it may wait 5 ms for it each time: reading
then does not overlap with computing. So the plain transport's reader is replaced by one that takes what is there.
"""

from __future__ import annotations

from typing import Any

from kafka.errors import KafkaConnectionError
from kafka.net.transport import KafkaTCPTransport

READ_BYTES = 1 << 20
"""What one call takes at most: more than a socket's buffer holds."""


def read_widely() -> None:
    """Replace the reader of every connection of this process that is not encrypted. Harmless if repeated."""
    KafkaTCPTransport._sock_recv = _sock_recv


def _sock_recv(transport: Any) -> tuple[bytes, Exception | None]:
    """All that has come, and what ended the connection."""
    parts: list[bytes] = []
    try:
        while part := transport._sock.recv(READ_BYTES):
            parts.append(part)
    except (BlockingIOError, InterruptedError):
        return b"".join(parts), None
    except OSError as error:
        return b"".join(parts), KafkaConnectionError(error)
    return b"".join(parts), KafkaConnectionError("socket disconnected")
