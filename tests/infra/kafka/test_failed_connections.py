"""A client leaves no socket open to the garbage collector, however a connection of its fails."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from kafka import KafkaAdminClient, KafkaConsumer
from kafka.errors import KafkaError

from infra.kafka import client_patches as client_repairs
from infra.kafka.broker import Broker, free_port
from infra.kafka.client_patches import patch_clients
from infra.kafka.properties import ClientProperties

TLS = {"security.protocol": "SSL"}


@pytest.fixture
def no_tls() -> Iterator[int]:
    """The port of a server that answers what it is sent by something else than TLS."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                with client:
                    client.recv(4096)
                    client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    """The sockets that clients make from now on."""
    from kafka.net.inet import KafkaNetSocket
    from kafka.net.transport import KafkaTCPTransport

    sockets: list[socket.socket] = []
    make, init = KafkaNetSocket.socket, KafkaTCPTransport.__init__

    class Remembered(client_repairs._Socket):
        """That of kafka-python is detached, and this one takes its place."""

        def __init__(self, *arguments: int, **more: int) -> None:
            super().__init__(*arguments, **more)
            sockets.append(self)

    def remember(*arguments: object) -> socket.socket:
        sockets.append(make(*arguments))
        return sockets[-1]

    def remember_wrapped(transport: object, net: object, sock: socket.socket, **more: object) -> None:
        sockets.append(sock)
        init(transport, net, sock, **more)

    monkeypatch.setattr(KafkaNetSocket, "socket", remember)
    monkeypatch.setattr(client_repairs, "_Socket", Remembered)
    monkeypatch.setattr(KafkaTCPTransport, "__init__", remember_wrapped)
    return sockets


def fail_to_connect(made: list[socket.socket], properties: dict[str, str], port: int) -> None:
    """Fail once with a socket: on a busy machine the time-out may come before the first is `made`."""
    client = ClientProperties({"bootstrap.servers": f"127.0.0.1:{port}", **properties})
    while not made:
        with pytest.raises(KafkaError):
            KafkaAdminClient(**client.admin(bootstrap_timeout_ms=700, request_timeout_ms=700))


def test_client_closes_sockets_of_refused_connections(made: list[socket.socket]) -> None:
    fail_to_connect(made, {}, free_port())
    assert {sock.fileno() for sock in made} == {-1}


def test_client_closes_sockets_of_failed_tls_handshakes(made: list[socket.socket], no_tls: int) -> None:
    fail_to_connect(made, TLS, no_tls)
    assert {sock.fileno() for sock in made} == {-1}


def test_client_closes_sockets_of_handshake_timeouts(
    made: list[socket.socket], silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_repairs, "HANDSHAKE_S", 0.3)
    fail_to_connect(made, TLS, silent)
    assert {sock.fileno() for sock in made} == {-1}


def test_client_closes_abandoned_sockets(made: list[socket.socket], silent: int) -> None:
    fail_to_connect(made, {}, silent)
    assert {sock.fileno() for sock in made} == {-1}


def test_closed_client_closes_sockets_with_unsent_data(made: list[socket.socket], broker: Broker) -> None:
    client = KafkaAdminClient(**broker.client().admin())
    client.list_topics()
    for connection in client._manager._conns.values():
        connection.transport._write_buffer.append(b"what a broker that hangs does not read")
    assert {sock.fileno() for sock in made} != {-1}
    client.close()
    assert {sock.fileno() for sock in made} == {-1}


@pytest.mark.parametrize("kind", [KafkaAdminClient, KafkaConsumer])
def test_client_that_fails_leaves_no_thread(kind: type[KafkaAdminClient | KafkaConsumer]) -> None:
    """A program that waits for Kafka makes one after the other."""
    patch_clients()
    before = threading.enumerate()
    with pytest.raises(KafkaError):
        kind(bootstrap_servers=f"127.0.0.1:{free_port()}", bootstrap_timeout_ms=200)
    assert [thread.name for thread in threading.enumerate() if thread not in before] == []
