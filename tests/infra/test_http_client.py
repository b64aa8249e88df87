"""A key goes to the address that was named, and nowhere else."""

from __future__ import annotations

import threading
import urllib.error
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from infra.http_client import post_json


class Recorder:
    """A server that records the path and key of each request, and responds with `status` and a location."""

    def __init__(self) -> None:
        outer = self
        self.status, self.location = 200, ""
        self.received: list[tuple[str, str | None]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                outer.received.append((self.path, self.headers["authorization"]))
                self.send_response(outer.status)
                self.send_header("location", outer.location)
                self.end_headers()
                self.wfile.write(b"{}")

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def gateway() -> Iterator[Recorder]:
    made = Recorder()
    yield made
    made.close()


@pytest.fixture
def stranger() -> Iterator[Recorder]:
    made = Recorder()
    yield made
    made.close()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_post_follows_no_redirect(status: int, gateway: Recorder, stranger: Recorder) -> None:
    gateway.status, gateway.location = status, f"{stranger.url}/v1"
    with pytest.raises(urllib.error.HTTPError, match=str(status)) as raised:
        post_json(f"{gateway.url}/v1/claim", "a-key", {}, 10)
    raised.value.close()
    assert gateway.received == [("/v1/claim", "Bearer a-key")]
    assert not stranger.received


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_post_uses_no_proxy_of_the_environment(
    name: str, gateway: Recorder, stranger: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, stranger.url)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with post_json(f"{gateway.url}/v1/claim", "a-key", {}, 10) as response:
        assert response.read() == b"{}"
    assert gateway.received == [("/v1/claim", "Bearer a-key")]
    assert not stranger.received


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://127.0.0.1/x", "data:,x", "127.0.0.1:80"])
def test_post_accepts_http_alone(url: str) -> None:
    with pytest.raises(ValueError, match="must begin with http:// or https://"):
        post_json(url, "a-key", {}, 10)
