"""Listening sockets of processes: which other machines, and which other users of this machine, can reach."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil

from infra.listening import exposed_addresses, listening_sockets, unix_addresses


def test_listening_sockets_include_tcp_and_udp_but_no_connections() -> None:
    before = listening_sockets([psutil.Process()])
    with socket.create_server(("0.0.0.0", 0)) as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        with socket.create_connection(("127.0.0.1", tcp.getsockname()[1])):
            found = listening_sockets([psutil.Process()]) - before
        assert found == {tcp.getsockname(), udp.getsockname()}
        assert exposed_addresses(found) == [f"0.0.0.0:{tcp.getsockname()[1]}"]


def test_unix_addresses_are_those_that_others_can_connect_to(tmp_path: Path) -> None:
    pair = socket.socketpair()
    with socket.socket(socket.AF_UNIX) as file, socket.socket(socket.AF_UNIX) as abstract, pair[0], pair[1]:
        before = unix_addresses([psutil.Process()])
        file.bind(str(tmp_path / "s"))
        abstract.bind(f"\0laminar-{os.getpid()}")
        assert unix_addresses([psutil.Process()]) - before == {str(tmp_path / "s"), f"@laminar-{os.getpid()}"}
