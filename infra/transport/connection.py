"""A connection between two peers: a plain socket, or one with encryption on top."""

from __future__ import annotations

import socket
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol


class Connection(AbstractContextManager[Any], Protocol):
    """What frames need of a connection. One thread may send while another receives."""

    def sendall(self, data: bytes | bytearray | memoryview, /) -> None: ...

    def recv_into(self, memory: memoryview, /) -> int: ...

    def settimeout(self, seconds: float | None, /) -> None: ...

    def shutdown(self, how: int, /) -> None: ...

    def close(self) -> None: ...


def interrupt(connection: Connection) -> None:
    """Shut `connection` down, so that a thread that waits for it stops waiting."""
    with suppress(OSError):
        if isinstance(connection, socket.socket):
            # Not SSLSocket.shutdown: after it the other thread would read encrypted bytes as plain text.
            socket.socket.shutdown(connection, socket.SHUT_RDWR)
        else:
            connection.shutdown(socket.SHUT_RDWR)
