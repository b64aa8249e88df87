"""Commands that read a run while its own broker starts or stops."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kafka.errors import KafkaConnectionError, KafkaTimeoutError

from infra.kafka.readiness import BrokerUnreachable
from pipelines.cli import options
from pipelines.cli.main import main
from pipelines.cli.options import Address, connect
from schemas.release import RELEASE


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is taken for the own broker of run `r`, and listens nowhere: it ends when its input does."""
    data = tmp_path / "r" / "kafka"
    data.mkdir(parents=True)
    state = {"release": RELEASE, "run": "r", "bootstrap_servers": "127.0.0.1:1", "started_at": 1.0, "ended_at": 2.0}
    (tmp_path / "r" / "state.json").write_text(json.dumps(state))
    command = [sys.executable, "-c", "input()", str(data / "server.properties")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        (data / "broker.json").write_text(json.dumps({"pid": process.pid}))
        yield process
        process.kill()


def test_command_reports_that_the_own_broker_starts(
    broker: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "OWN_BROKER_S", 0.0)
    with pytest.raises(BrokerUnreachable, match=r"own broker is starting or stopping: .*Try again in a moment"):
        connect("r", None, None, tmp_path, read_only=True)


def test_command_reads_the_files_once_the_own_broker_has_stopped(
    broker: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options.time, "sleep", lambda _: broker.communicate())  # it stops while the command waits
    connection = connect("r", None, None, tmp_path, read_only=True)
    assert (connection.run, connection.client.log) == ("r", tmp_path / "r" / "kafka" / "log")


def test_stopped_log_is_none_while_the_state_is_unreadable(
    broker: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    address, state = Address(run="./r"), tmp_path / "r" / "state.json"
    broker.communicate()
    log = address.stopped_log()
    assert log is not None
    assert log.log == tmp_path / "r" / "kafka" / "log"
    old = {key: value for key, value in json.loads(state.read_text()).items() if key != "release"}
    for text in ("{", json.dumps(old)):
        state.write_text(text)
        assert address.stopped_log() is None
    state.unlink()
    assert address.stopped_log() is None


@pytest.mark.parametrize("error", [KafkaConnectionError("111 ECONNREFUSED"), KafkaTimeoutError("no answer")])
def test_connection_lost_in_a_command_is_no_bare_library_error(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("pipelines.inspect.run_folders.list_runs", fail)
    with pytest.raises(SystemExit) as ended:
        main(["runs", "list"])
    printed = capsys.readouterr().err
    assert ended.value.code == 1
    assert "Kafka no longer responds" in printed
    assert "try again in a moment" in printed
    assert "--debug" not in printed
