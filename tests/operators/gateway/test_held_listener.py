"""Requests wait while the only gateway restarts: the process that forks it holds the listening socket."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from operators.gateway import serve_agents
from operators.gateway.config import GatewayConfig
from operators.gateway.serve_agents import hold_listener, listen
from operators.io.episode_keys import ADDRESS_FILE
from pipelines.run.zygote import _Zygote


@pytest.fixture(autouse=True)
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    sockets: list[socket.socket] = []
    monkeypatch.setattr(serve_agents, "_held", sockets)
    yield sockets
    for each in sockets:
        each.close()


def test_connections_wait_for_the_next_gateway(held: list[socket.socket], tmp_path: Path) -> None:
    hold_listener(GatewayConfig(), tmp_path)
    hold_listener(GatewayConfig(), tmp_path)  # as before each start
    address = held[0].getsockname()
    first = listen(GatewayConfig(), tmp_path)
    assert first.fileno() != held[0].fileno()
    first.close()
    with socket.create_connection(address, timeout=30) as client, listen(GatewayConfig(), tmp_path) as second:
        connection, _ = second.accept()
        with connection:
            connection.sendall(b"second")
        assert client.recv(6) == b"second"


def test_zygote_holds_the_listener_of_the_gateway_that_it_starts(
    held: list[socket.socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f"[run]\nfolder = '{tmp_path}'\n[gateway]\n")
    monkeypatch.setattr("os.fork", lambda: (_ for _ in ()).throw(OSError("no process")))
    zygote = _Zygote(*os.pipe())
    for role, count in (("score", 0), ("gateway", 1)):
        zygote._start({"start": role, "roles": [[role, 0]], "config": str(file), "log": "unused"})
        assert len(held) == count
    (file,) = tmp_path.rglob(ADDRESS_FILE)
    address = held[0].getsockname()
    assert json.loads(file.read_text())["port"] == address[1]
    zygote._execute({"signal": "score", "number": signal.SIGINT})
    assert held
    zygote._execute({"signal": "gateway", "number": signal.SIGINT})  # it is to end for good
    assert not held
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=30)


@pytest.mark.parametrize(("name", "url_host"), [("", "127.0.0.2"), ("localhost", "localhost"), ("::1", "[::1]")])
def test_agents_get_the_advertised_host(name: str, url_host: str, tmp_path: Path) -> None:
    with listen(GatewayConfig(host="127.0.0.2", advertise=name), tmp_path) as listening:
        port = listening.getsockname()[1]
    assert json.loads((tmp_path / ADDRESS_FILE).read_text())["url"] == f"http://{url_host}:{port}/v1"


def test_several_gateways_listen_themselves(held: list[socket.socket], tmp_path: Path) -> None:
    hold_listener(GatewayConfig(processes=2), tmp_path)
    assert not held


def test_gateways_that_start_together_share_the_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both, write = threading.Barrier(2), serve_agents.write_atomically

    def write_together(*of: Any) -> None:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # the other one has a port too, unless it waits for this one
        write(*of)

    monkeypatch.setattr(serve_agents, "write_atomically", write_together)
    with ThreadPoolExecutor(2) as threads, ExitStack() as stack:
        starts = [threads.submit(listen, GatewayConfig(processes=2), tmp_path) for _ in range(2)]
        sockets = [stack.enter_context(each.result()) for each in starts]
        assert len({each.getsockname() for each in sockets}) == 1


def test_address_in_use_is_left_to_the_gateway(held: list[socket.socket], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        config = GatewayConfig(port=other.getsockname()[1])
        hold_listener(config, tmp_path)
        assert not held
        with pytest.raises(OSError, match="gateway: cannot listen at"):
            listen(config, tmp_path)
