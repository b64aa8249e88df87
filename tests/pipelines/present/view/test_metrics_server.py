"""The server of `laminar metrics serve` under attack: floods, slow clients, large requests and unread responses."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge
from waiting import until

from infra.kafka.properties import ClientProperties
from infra.listening import exposed_addresses
from pipelines.cli import metrics
from pipelines.cli.options import RunClient, TransactionalAddress
from pipelines.config import load_config
from pipelines.present.view.exposition import serving_metrics

LONG_S = 600.0
HEADER = b"GET /metrics HTTP/1.1\r\nhost: x\r\n"


@contextmanager
def served(most: int = 8, header_s: float = LONG_S, series: int = 1) -> Iterator[int]:
    registry = CollectorRegistry()
    for number in range(series):
        Gauge(f"laminar_example_{number}", "x" * 200, registry=registry).set(4)
    with serving_metrics(registry, "127.0.0.1", 0, most, header_s) as port:
        yield port


def connect(port: int, sent: bytes = b"") -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), timeout=30)
    made.sendall(sent)
    return made


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        return str(response.read().decode())


def response_of(connection: socket.socket) -> bytes:
    """All that the server sends until it ends the connection; if it does not, the receive times out."""
    data = b""
    with suppress(ConnectionResetError):
        while received := connection.recv(65536):
            data += received
    return data


def test_server_answers_scrapes_and_ends_with_its_context() -> None:
    with served() as port:
        assert "laminar_example_0 4.0" in scrape(port)
    with pytest.raises(ConnectionRefusedError):
        connect(port)


def test_flood_of_silent_connections_does_not_stop_scrapes() -> None:
    with served() as port, ExitStack() as stack:
        silent = [stack.enter_context(connect(port)) for _ in range(100)]
        assert "laminar_example_0 4.0" in scrape(port)
        assert all(response_of(each) == b"" for each in silent[:90])


@pytest.mark.parametrize("sent", [HEADER, HEADER + b"x-long: " + b"a" * 200_000])
def test_incomplete_or_large_header_ends_its_connection(sent: bytes) -> None:
    with served(header_s=0.2) as port, connect(port) as client:
        with suppress(OSError):  # the server may have ended it while it is sent
            client.sendall(sent)
        assert b"200 OK" not in response_of(client)

        def answers() -> bool:
            with suppress(OSError):  # this process may be too slow to send its header
                return "laminar_example_0 4.0" in scrape(port)
            return False

        until(answers)


def test_unread_responses_do_not_stop_scrapes() -> None:
    """Each client asks for far more than fits into the buffers of its socket, and reads nothing."""
    with served(series=300) as port, ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connect(port, (HEADER + b"\r\n") * 200))
        assert "laminar_example_0 4.0" in scrape(port)


def test_body_of_a_request_is_not_read_to_its_end() -> None:
    with served(header_s=1.0) as port, ExitStack() as stack:
        clients: list[socket.socket] = []

        def answers() -> bool:
            with suppress(ConnectionError):  # this process may be too slow to send its header
                clients.append(stack.enter_context(connect(port)))
                clients[-1].sendall(HEADER + b"content-length: 1000000000000\r\n\r\n")
                return clients[-1].recv(65536).startswith(b"HTTP/1.1 200")
            return False

        until(answers)
        ended = False
        while not ended:  # the server ends the connection, so the pipe breaks
            try:
                clients[-1].sendall(bytes(65536))
            except OSError:
                ended = True


@pytest.mark.parametrize(("given", "expected"), [(None, 7.0), (9.0, 9.0)])
def test_audits_wait_for_the_time_out_of_the_run(
    given: float | None, expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "runs" / "first" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text("[run]\nname = 'first'\n[kafka]\ntransaction_timeout_s = 7.0")
    client = RunClient("first", ClientProperties.at("kafka:9092"))
    address = TransactionalAddress(run="first", transaction_timeout=given)
    with metrics._audits(address, client, 60.0, lambda counts: None) as audits:
        assert load_config(audits._config_file).kafka.transaction_timeout_s == expected


def test_metrics_command_listens_on_loopback_by_default() -> None:
    import inspect

    from pipelines.cli.metrics import serve

    host = inspect.signature(serve).parameters["host"].default
    assert not exposed_addresses([(host, 9464)])
