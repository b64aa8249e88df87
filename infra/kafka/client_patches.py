"""What kafka-python's connections do wrong or slowly, put right for the whole process.

- It reads its sockets 4 KB at a time and releases the interpreter for each: a fetch of a megabyte takes it 270 times,
  and beside a thread that computes it may wait 5 ms for it each time. Reading then does not overlap with computing.
- A socket whose connection is not made, or that still has something to send when its client is closed, is never closed.
  It is collected at some later time, as a ResourceWarning of whatever happens to run then.
- It waits for the answer to a TLS handshake for ever, and closes no socket whose handshake has failed.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from typing import Any

READ_BYTES = 1 << 20
"""What one call takes at most: more than a socket's buffer holds."""
HANDSHAKE_S = 10.0
"""How long a TLS handshake may take."""


def patch_clients() -> None:
    """Replace four methods. Harmless if repeated; encrypted connections keep their own way of reading."""
    from kafka.net.inet import KafkaNetSocket  # here: who only describes a client does not need the library
    from kafka.net.selector import NetworkSelector
    from kafka.net.transport import KafkaSSLTransport, KafkaTCPTransport

    KafkaTCPTransport._sock_recv = _sock_recv
    KafkaSSLTransport.handshake = _handshake
    KafkaNetSocket.connect = _connect
    if NetworkSelector.close.__module__ != __name__:
        NetworkSelector.close = _close_with_sockets(NetworkSelector.close)


def _sock_recv(transport: Any) -> tuple[bytes, Exception | None]:
    """All that has come, and what ended the connection."""
    from kafka.errors import KafkaConnectionError

    parts: list[bytes] = []
    try:
        while part := transport._sock.recv(READ_BYTES):
            parts.append(part)
    except (BlockingIOError, InterruptedError):
        return b"".join(parts), None
    except OSError as error:
        return b"".join(parts), KafkaConnectionError(error)
    return b"".join(parts), KafkaConnectionError("socket disconnected")


def _close_with_sockets(close: Callable[[Any], None]) -> Callable[[Any], None]:
    """The selector's `close`, after which no socket that it watched is open."""

    def close_all(selector: Any) -> None:
        if selector._closed:
            return
        if selector._io_thread is not None:
            selector.stop()
        watched = [key.fileobj for key in selector._selector.get_map().values()]
        close(selector)
        for sock in watched:
            sock.close()

    return close_all


async def _connect(made: Any, net: Any, addrinfo: Any, socket_options: Any = (), timeout_at: Any = None) -> Any:
    """A connected socket; one that is not is closed."""
    family, kind, protocol, _, address = addrinfo
    sock = made.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        for option in socket_options:
            sock.setsockopt(*option)
        return await made.sock_connect(net, sock, address, timeout_at=timeout_at)
    except BaseException:
        sock.close()
        raise


async def _handshake(transport: Any) -> None:
    """Make the TLS handshake; a socket of one that fails is closed. Raises OSError, KafkaTimeoutError."""
    net, sock, until = transport._net, transport._sock, time.monotonic() + HANDSHAKE_S
    try:
        while True:
            try:
                return sock.do_handshake()
            except ssl.SSLWantReadError:
                await net.wait_read(sock, timeout_at=until)
            except ssl.SSLWantWriteError:
                await net.wait_write(sock, timeout_at=until)
    except BaseException:
        sock.close()
        raise
