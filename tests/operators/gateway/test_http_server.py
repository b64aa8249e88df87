"""Attacks on the gateway's listening socket: floods, slow clients, old TLS, and requests that no client would send."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPResponse
from pathlib import Path

import pytest
from gateway_harness import NAME, ScriptedRun, user
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from infra.certificates import write_relay_files
from infra.http_server import Connections, HttpServer
from operators.gateway.app import MAX_EPISODE_REQUESTS, Gateway
from operators.gateway.config import GatewayConfig
from operators.gateway.serve_agents import listen, server_context

LONG_S = 600.0


class Served:
    """A gateway over a scripted run, at a socket."""

    def __init__(self, folder: Path, header_s: float, *texts: str, most: int = 16, body_s: float = 60.0) -> None:
        self.run = ScriptedRun(*texts)
        self.connections = Connections(most)
        self._header_s, self._body_s = header_s, body_s
        self._socket = listen(self.run.config, folder)
        self.port = self._socket.getsockname()[1]
        self.ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self) -> None:
        self.gateway: Gateway = self.run.open()
        self.run.assign()
        self.gateway.connections, self.gateway.body_s = self.connections, self._body_s
        application = self.gateway.application()
        self.server = HttpServer(application, self.connections, server_context(self.run.config), self._header_s)
        self.ready.set()
        await self.server.serve([self._socket])

    def __enter__(self) -> Served:
        self._thread.start()
        assert self.ready.wait(30)
        while not self.server.started:  # until then it can still replace the application
            time.sleep(0.001)
            assert self._thread.is_alive()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    @contextmanager
    def connection(self, sent: bytes = b"") -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as made:
            made.sendall(sent)
            yield made

    def request(self, path: str, body: object = None, key: str | None = None) -> bytes:
        text = b"" if body is None else json.dumps(body).encode()
        key = self.run.keys.key_of(NAME) if key is None else key
        head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        return f"{head}content-length: {len(text)}\r\n\r\n".encode() + text

    def status(self, sent: bytes) -> int:
        with self.connection(sent) as made:
            return status_of(made)


def status_of(connection: socket.socket) -> int:
    """The status of the next response; 0 if the connection ends without one."""
    data = b""
    while b"\r\n" not in data:
        received = connection.recv(65536)
        if not received:
            return 0
        data += received
    return int(data.split()[1])


def has_ended(connection: socket.socket) -> bool:
    """Whether the server ends the connection, after what it still sends; if not, the receive times out."""
    with suppress(ConnectionResetError):
        while connection.recv(65536):
            pass
    return True


def test_idle_connections_do_not_lock_agents_out(tmp_path: Path) -> None:
    with Served(tmp_path, LONG_S, "hi$", most=16) as served, ExitStack() as stack:
        idle = [stack.enter_context(served.connection()) for _ in range(100)]
        assert served.status(served.request("/v1/models")) == 200
        assert all(has_ended(each) for each in idle[:80])
        assert len(served.connections) <= 16


def test_second_write_of_a_response_waits_for_no_client(tmp_path: Path) -> None:
    """A response is two writes: with Nagle's algorithm the second one waits up to 40 ms for an acknowledgement."""
    with Served(tmp_path, LONG_S, "hi$") as served, served.connection(served.request("/v1/models", key="none")) as made:
        assert status_of(made) == 401
        (accepted,) = served.connections._connections.values()
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_connection_with_a_key_outlives_a_flood(tmp_path: Path) -> None:
    with Served(tmp_path, LONG_S, "hi$", most=4) as served, ExitStack() as stack:
        agent = stack.enter_context(served.connection(served.request("/v1/models")))
        assert status_of(agent) == 200
        others = [stack.enter_context(served.connection(b"GET /v1/models HT")) for _ in range(20)]
        assert has_ended(others[0])
        agent.sendall(served.request("/v1/episode"))
        assert status_of(agent) == 200


@pytest.mark.parametrize("before", [False, True])
def test_incomplete_header_ends_its_connection(tmp_path: Path, before: bool) -> None:
    with Served(tmp_path, LONG_S if before else 0.2) as served, served.connection() as made:
        if before:  # as a second request of a connection with a key
            made.sendall(served.request("/v1/models"))
            assert status_of(made) == 200
            (accepted,) = served.server.server_state.connections
            accepted._header_s = 0.2  # only now: the first header may take longer on a busy machine
        made.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
        assert has_ended(made)


def test_incomplete_body_is_answered_and_frees_its_place(tmp_path: Path) -> None:
    with Served(tmp_path, LONG_S, body_s=0.1) as served:
        sent = served.request("/v1/chat/completions", {"messages": [user("hello")]})
        assert served.status(sent[:-1]) == 408
        assert not served.gateway.active


def test_one_episode_cannot_take_the_places_of_all(tmp_path: Path) -> None:
    with Served(tmp_path, LONG_S, "hi$", most=200) as served, ExitStack() as stack:
        sent = served.request("/v1/chat/completions", {"messages": [user("hello")]})
        for _ in range(MAX_EPISODE_REQUESTS + 1):
            stack.enter_context(served.connection(sent[:-1]))
        other = served.request("/v1/models", key=served.run.keys.key_of("p1.0"))
        while served.gateway.active[NAME] < MAX_EPISODE_REQUESTS:
            assert served.status(other) == 200
        assert served.status(sent) == 429
        assert served.status(other) == 200


def test_idle_connections_with_one_key_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest end, but not one with a request in progress."""
    monkeypatch.setattr("infra.http_server.MAX_IDLE", 4)
    with Served(tmp_path, LONG_S, "hi$") as served, ExitStack() as stack:
        served.run.paused = True
        sent = served.request("/v1/chat/completions", {"messages": [user("hello")]})
        busy = stack.enter_context(served.connection(sent))
        while not served.gateway.active[NAME]:
            assert served.status(served.request("/v1/models", key=served.run.keys.key_of("p1.0"))) == 200
        idle = [stack.enter_context(served.connection()) for _ in range(12)]
        for each in idle:
            each.sendall(served.request("/v1/models"))
            assert status_of(each) == 200
        assert all(has_ended(each) for each in idle[:8])
        idle[-1].sendall(served.request("/v1/models"))
        assert status_of(idle[-1]) == 200
        while not served.run.orders:
            time.sleep(0.001)
        served.run.respond(served.run.orders[0])
        assert status_of(busy) == 200


def test_connection_is_not_idle_while_its_next_request_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one may begin before the first has ended for the server."""
    monkeypatch.setattr("infra.http_server.MAX_IDLE", 0)
    connections, address = Connections(), ("127.0.0.1", 1)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connections.add(address, ours)
        first, second = connections.in_progress(address, NAME), connections.in_progress(address, "p1.0")
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        ours.sendall(b"response")
        assert theirs.recv(100) == b"response"
        second.__exit__(None, None, None)
        assert has_ended(theirs)


def test_a_stream_is_in_progress_until_its_end(tmp_path: Path) -> None:
    with Served(tmp_path, LONG_S, "hi$") as served:
        served.run.paused = True
        sent = served.request("/v1/chat/completions", {"messages": [user("hello")], "stream": True})
        other = served.request("/v1/models", key=served.run.keys.key_of("p1.0"))
        with served.connection(sent):
            while not served.run.orders:
                assert served.status(other) == 200
            assert served.gateway.active[NAME] == 1  # those of others end a moment after their response


@pytest.mark.parametrize("stream", [False, True])
def test_request_of_a_client_that_has_gone_frees_its_place(tmp_path: Path, stream: bool) -> None:
    with Served(tmp_path, LONG_S, "hi$") as served:
        served.run.paused = True
        sent = served.request("/v1/chat/completions", {"messages": [user("hello")], "stream": stream})
        other = served.request("/v1/models", key=served.run.keys.key_of("p1.0"))
        with served.connection(sent):
            while not served.run.orders:
                assert served.status(other) == 200
        while served.gateway.active[NAME]:
            assert served.status(other) == 200
        served.run.respond(served.run.orders[0])  # the turn has continued: a retry gets its response
        retry = sent.replace(b"host: x", b"host: x\r\nx-stainless-retry-count: 1")
        assert served.status(retry) == 200
        assert len(served.run.orders) == 1


def test_client_that_reads_nothing_frees_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.http_server.READ_S", 1)
    with Served(tmp_path, LONG_S, "hi$") as served:

        async def endless(request: Request, name: str) -> Response:
            return StreamingResponse(b"x" * 2**20 for _ in iter(int, 1))

        served.gateway._episode = endless  # type: ignore[method-assign]
        served.server.config.loaded_app = served.gateway.application()
        other = served.request("/v1/models", key=served.run.keys.key_of("p1.0"))
        with served.connection(served.request("/v1/episode")) as made:
            assert status_of(made) == 200
            while served.gateway.active[NAME]:
                assert served.status(other) == 200


def test_errors_of_paths_and_of_the_gateway_have_openai_shape(tmp_path: Path) -> None:
    with Served(tmp_path, LONG_S, "hi$") as served:

        async def failing(request: Request, name: str) -> Response:
            raise KeyError(name)

        served.gateway._episode = failing  # type: ignore[method-assign]
        served.server.config.loaded_app = served.gateway.application()
        for path, body, status in (("/v1/x", None, 404), ("/v1/models", {}, 405), ("/v1/episode", None, 500)):
            with served.connection(served.request(path, body)) as made:
                response = HTTPResponse(made)
                response.begin()
                assert response.status == status
                assert json.load(response)["error"].keys() == {"message", "type", "param", "code"}
        assert served.status(served.request("/v1/models/laminar")) == 200
        assert served.status(served.request("/v1/models/other")) == 404


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "\\udfff", "messages": [{"role": "user", "content": "a"}]}',
        b'{"messages": ' + b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": "a", "name": ' + b"[" * 65 + b"]" * 65 + b"}]}",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
    ],
)
def test_body_that_cannot_be_recorded_is_a_clear_error(tmp_path: Path, body: bytes) -> None:
    with Served(tmp_path, LONG_S, "hi$") as served:
        head = served.request("/v1/chat/completions", {}).partition(b"content-length")[0]
        sent = head + f"content-length: {len(body)}\r\n\r\n".encode() + body
        assert served.status(sent) == 400
        assert served.status(served.request("/v1/models")) == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: " + b"b" * 100_000,
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
        b"GET /k/../../v1/models HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
)
def test_invalid_http_is_refused(tmp_path: Path, sent: bytes) -> None:
    with Served(tmp_path, LONG_S) as served:
        assert 400 <= served.status(sent) < 500
        assert served.status(served.request("/v1/models")) == 200


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Certificate with key, and its authority."""
    _, made, authority = write_relay_files(tmp_path_factory.mktemp("tls"))
    return str(made), str(authority)


def test_tls_clients_need_version_1_3(tmp_path: Path, certificate: tuple[str, str]) -> None:
    own, authority = certificate
    served = Served(tmp_path, LONG_S)
    served.run.config = GatewayConfig(certificate_file=own, key_file=own)
    with served:
        client = ssl.create_default_context(cafile=authority)
        client.check_hostname = False
        with served.connection() as made, client.wrap_socket(made) as secure:
            assert secure.version() == "TLSv1.3"
            secure.sendall(served.request("/v1/models"))
            assert status_of(secure) == 200
        client.maximum_version = ssl.TLSVersion.TLSv1_2
        with served.connection() as made, pytest.raises(ssl.SSLError):
            client.wrap_socket(made)
        assert served.status(served.request("/v1/models")) == 0  # clear text


def test_silent_tls_clients_are_bounded(tmp_path: Path, certificate: tuple[str, str]) -> None:
    own, _ = certificate
    served = Served(tmp_path, LONG_S, most=4)
    served.run.config = GatewayConfig(certificate_file=own, key_file=own)
    with served, ExitStack() as stack:
        silent = [stack.enter_context(served.connection()) for _ in range(20)]
        assert all(has_ended(each) for each in silent[:12])


def test_missing_certificate_is_named() -> None:
    with pytest.raises(ValueError, match=r"gateway.certificate_file none.pem and gateway.key_file none.key cannot be"):
        server_context(GatewayConfig(certificate_file="none.pem", key_file="none.key"))


@pytest.mark.parametrize("name", ["a.example:8443", "https://a.example", "a/b", "0.0.0.0", "::", "a b", "a?b", "-a"])
def test_gateway_advertises_a_host_without_a_port(name: str) -> None:
    wide = {"host": "0.0.0.0", "certificate_file": "one.pem", "key_file": "one.pem"}
    with pytest.raises(ValueError, match="advertise must be a host name or address, without a port, not"):
        GatewayConfig(**wide, advertise=name)
    for valid in ("2001:db8::1", "gpu1.example", "gpu1"):
        assert GatewayConfig(**wide, advertise=valid).advertise == valid
        with pytest.raises(ValueError, match=r"cannot connect at host '127\.0\.0\.1': set host, too"):
            GatewayConfig(advertise=valid)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "gateway.example"])
def test_gateway_beyond_loopback_requires_tls(host: str) -> None:
    with pytest.raises(ValueError, match="set certificate_file and key_file"):
        GatewayConfig(host=host)
    with pytest.raises(ValueError, match="set both or neither"):
        GatewayConfig(host=host, certificate_file="one.pem")
