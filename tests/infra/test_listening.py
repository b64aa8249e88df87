"""Listening sockets of processes: which other machines, and which other users of this machine, can reach."""

from __future__ import annotations

import socket

import psutil

from infra.listening import exposed_addresses, listening_sockets


def test_listening_sockets_include_tcp_and_udp_no_connections() -> None:
    before = listening_sockets([psutil.Process()])
    with socket.create_server(("0.0.0.0", 0)) as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        with socket.create_connection(("127.0.0.1", tcp.getsockname()[1])):
            found = listening_sockets([psutil.Process()]) - before
        assert found == {tcp.getsockname(), udp.getsockname()}
        assert exposed_addresses(found) == [f"0.0.0.0:{tcp.getsockname()[1]}"]
