"""What has come on a socket is taken whole, and its end is told."""

from __future__ import annotations

import socket
from types import SimpleNamespace

from kafka.net.transport import KafkaTCPTransport

from infra.kafka.wide_reads import read_widely


def test_all_that_has_come_is_read_and_the_end_is_an_error() -> None:
    read_widely()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        transport = SimpleNamespace(_sock=ours)
        assert KafkaTCPTransport._sock_recv(transport) == (b"", None)
        theirs.sendall(b"x" * 100_000)
        assert KafkaTCPTransport._sock_recv(transport) == (b"x" * 100_000, None)
        theirs.sendall(b"last words")
        theirs.close()
        words, error = KafkaTCPTransport._sock_recv(transport)
        assert words == b"last words"
        assert "socket disconnected" in str(error)
