"""The detached broker: another process finds it, and only it, and can stop it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from infra.kafka.broker import BrokerConfig, BrokerStartError, start_broker
from infra.kafka.detached_broker import detached_status, start_detached, stop_detached
from infra.processes import is_running

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def state_dir(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    stop_detached(tmp_path)


def test_detached_broker_outlives_its_starter(state_dir: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from infra.kafka.detached_broker import *;"
        "print(start_detached(Path(sys.argv[1])).pid)"
    )
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", program, str(state_dir)]
    starter = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=True)
    status = detached_status(state_dir)
    assert status is not None
    assert status.pid == int(starter.stdout)
    assert start_detached(state_dir) == status  # starting again finds the one that runs
    with pytest.raises(BrokerStartError, match=f"pid {status.pid}"):
        start_broker(BrokerConfig(state_dir))
    process = psutil.Process(status.pid)
    assert stop_detached(state_dir)
    assert not is_running(process)
    assert detached_status(state_dir) is None
    assert not stop_detached(state_dir)
    again = start_detached(state_dir)
    assert again.bootstrap_servers == status.bootstrap_servers
    assert again.pid != status.pid


def test_detached_status_ignores_process_with_reused_id(state_dir: Path) -> None:
    (state_dir / "broker.json").write_text(json.dumps({"pid": os.getpid(), "bootstrap_servers": "127.0.0.1:1"}))
    assert detached_status(state_dir) is None
    assert not stop_detached(state_dir)  # which would have ended this test
    assert is_running(psutil.Process())
