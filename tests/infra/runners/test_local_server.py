"""A job server of this process's own ends with it, but not before the workers that talk to it."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from infra.kafka.broker import port_is_free
from infra.runners.local_server import ALLOW_VARIABLE, ExposedServer, running_server


def listening(port: int, folder: Path) -> list[str]:
    return [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(folder)]


def test_it_outlives_the_threads_in_which_a_jobs_steps_run() -> None:
    outlived: list[bool] = []
    with running_server("Listener", listening, 10.0) as endpoint:
        port = int(endpoint.rpartition(":")[2])

        def work() -> None:
            time.sleep(0.5)
            outlived.append(not port_is_free(port))

        threading.Thread(target=work, name="run_worker_job-1").start()
    assert (outlived, port_is_free(port)) == ([True], True)


def test_what_does_not_come_up_is_said_with_its_last_words() -> None:
    def failing(port: int, folder: Path) -> list[str]:
        return [sys.executable, "-c", "raise SystemExit('no room')"]

    with (
        pytest.raises(RuntimeError, match="Failing did not come up: no room"),
        running_server("Failing", failing, 10.0),
    ):
        pass


def test_a_server_that_other_machines_reach_is_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_to_all(port: int, folder: Path) -> list[str]:
        return [sys.executable, "-m", "http.server", str(port), "--bind", "0.0.0.0", "--directory", str(folder)]

    with (
        pytest.raises(ExposedServer, match=r"Listener listens at 0\.0\.0\.0:"),
        running_server("Listener", open_to_all, 10.0),
    ):
        pass
    monkeypatch.setenv(ALLOW_VARIABLE, "1")
    with running_server("Listener", open_to_all, 10.0) as endpoint:
        assert endpoint
