"""A local job server ends with its context, but after the worker threads that use it."""

from __future__ import annotations

import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from waiting import until

from infra.kafka.broker import port_is_free
from infra.runners import local_server
from infra.runners.local_server import (
    ALLOW_VARIABLE,
    START_TIMEOUT_S,
    ExposedServer,
    NoJobServer,
    running_server,
    wait_for_job_server,
)


def server_at(port: int, timeout_s: int) -> PipelineOptions:
    return PipelineOptions([f"--job_endpoint=127.0.0.1:{port}", f"--job_server_timeout={timeout_s}"])


def listening(port: int, folder: Path) -> list[str]:
    return [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(folder)]


def test_local_server_ends_after_the_worker_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_server, "_WORKERS_TIMEOUT_S", 60.0)
    server_was_running: list[bool] = []
    with running_server("Listener", listening, START_TIMEOUT_S) as endpoint:
        port = int(endpoint.rpartition(":")[2])

        def work() -> None:
            time.sleep(0.5)
            server_was_running.append(not port_is_free(port))

        threading.Thread(target=work, name="run_worker_job-1").start()
    assert (server_was_running, port_is_free(port)) == ([True], True)


def test_local_server_raises_with_the_log_if_it_does_not_start() -> None:
    def failing(port: int, folder: Path) -> list[str]:
        return [sys.executable, "-c", "raise SystemExit('no room')"]

    with (
        pytest.raises(RuntimeError, match="Failing did not start: no room"),
        running_server("Failing", failing, START_TIMEOUT_S),
    ):
        pass


def test_local_server_rejects_an_exposed_port_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_to_all(port: int, folder: Path) -> list[str]:
        return [sys.executable, "-m", "http.server", str(port), "--bind", "0.0.0.0", "--directory", str(folder)]

    with (
        pytest.raises(ExposedServer, match=r"Listener listens at 0\.0\.0\.0:"),
        running_server("Listener", open_to_all, START_TIMEOUT_S),
    ):
        pass
    monkeypatch.setenv(ALLOW_VARIABLE, "1")
    with running_server("Listener", open_to_all, START_TIMEOUT_S) as endpoint:
        assert endpoint


def test_wait_ends_as_soon_as_a_job_server_answers() -> None:
    """An older server need not know the request."""
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        assert wait_for_job_server(server_at(port, 60))
        server.stop(None).wait()


def test_wait_for_a_silent_server_raises_and_leaves_no_thread() -> None:
    before = threading.enumerate()
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(NoJobServer, match=r"no job server responds at .* after 1 s: set --job_endpoint"),
    ):
        wait_for_job_server(server_at(silent.getsockname()[1], 1))
    until(lambda: not set(threading.enumerate()) - set(before))
