"""What kafka-python's connections do wrong is put right."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace

import pytest
from kafka.net.inet import KafkaNetSocket
from kafka.net.transport import KafkaTCPTransport

from infra.kafka.client_patches import patch_clients


def test_recv_reads_all_bytes_before_disconnect() -> None:
    patch_clients()
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


@pytest.mark.parametrize("ends", [ConnectionRefusedError, asyncio.CancelledError])
def test_connect_closes_socket_after_failure(ends: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    patch_clients()
    opened: list[socket.socket] = []

    async def fail(made: object, net: object, sock: socket.socket, address: object, timeout_at: object) -> None:
        opened.append(sock)
        raise ends

    monkeypatch.setattr(KafkaNetSocket, "sock_connect", fail)
    address = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", 9))
    with pytest.raises(ends):
        asyncio.run(KafkaNetSocket().connect(None, address))
    assert [sock.fileno() for sock in opened] == [-1]
