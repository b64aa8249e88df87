"""A Flink cluster of another version than the job server's, or none, is rejected before a job server starts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from infra.kafka.broker import free_port
from infra.runners.flink import UnsupportedFlink, check_cluster, running_flink
from infra.runners.run import run_pipeline


@contextmanager
def cluster(body: bytes) -> Iterator[str]:
    """The address of a REST interface that answers `/config` with `body`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/config" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def config(version: object) -> bytes:
    return json.dumps({"refresh-interval": 3000, "flink-version": version}).encode()


@pytest.mark.parametrize("version", ["1.19.1", "1.19.3", "1.19-SNAPSHOT", "1.19"])
@pytest.mark.parametrize("scheme", ["", "http://"])
def test_cluster_of_the_job_servers_version_is_accepted(
    version: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with cluster(config(version)) as address:
        check_cluster(scheme + address)


@pytest.mark.parametrize("version", ["2.2.0", "1.20.0", "1.190", "1.1", "", None, 2])
def test_cluster_of_another_version_is_rejected_with_both(version: object) -> None:
    with cluster(config(version)) as address, pytest.raises(UnsupportedFlink) as rejected:
        check_cluster(address)
    for part in (address, str(version), "Beam 2.70.0 for Flink 1.19", "--job_endpoint"):
        assert part in str(rejected.value)


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b"[]", b'{"flink-version"', b"1" * 100_000])
def test_server_that_is_no_flink_is_rejected(body: bytes) -> None:
    with cluster(body) as address, pytest.raises(UnsupportedFlink, match="no Flink responds"):
        check_cluster(address)


def test_pipeline_for_an_unresponsive_cluster_is_rejected() -> None:
    master = f"127.0.0.1:{free_port()}"
    with pytest.raises(UnsupportedFlink, match=f"no Flink responds at http://{master}/config .*refused"):
        run_pipeline(lambda pipeline: None, "flink", [f"--flink_master={master}"])
    with pytest.raises(UnsupportedFlink), running_flink(master=master):
        pass
