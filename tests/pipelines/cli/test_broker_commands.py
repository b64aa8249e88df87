"""`laminar broker start`, `status` and `stop` with a real broker: their output and exit codes."""

from __future__ import annotations

import json
import pwd
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from infra.kafka.broker import Broker
from infra.kafka.detached_broker import stop_detached
from infra.kafka.properties import ClientProperties
from infra.kafka.readiness import connection_problem
from infra.processes import is_running

Laminar = Callable[..., tuple[int, str, str]]


@pytest.fixture
def laminar(tmp_path: Path, command: Laminar) -> Iterator[Laminar]:
    """Call `laminar broker` with a folder of its own; return exit code, stdout and stderr."""

    yield lambda *words: command("broker", *words, "--folder", str(tmp_path))
    stop_detached(tmp_path)


def test_broker_status_and_stop_without_broker(laminar: Laminar) -> None:
    assert laminar("status") == (1, "no broker is running\n", "")
    assert laminar("stop") == (0, "no broker was running\n", "")
    code, out, _ = laminar("status", "--json")
    assert (code, json.loads(out)) == (1, {"running": False})
    code, out, _ = laminar("stop", "--json")
    assert (code, json.loads(out)) == (0, {"stopped": False})


def test_broker_start_status_and_stop(laminar: Laminar, tmp_path: Path) -> None:
    code, out, err = laminar("start", "--json")
    status = json.loads(out)
    assert (code, status["running"], status["data"]) == (0, True, str(tmp_path))
    assert "starting Apache Kafka on 127.0.0.1:" in err
    assert Path(status["log"]).is_file()
    assert connection_problem(ClientProperties.at(status["bootstrap_servers"]).admin()) is None
    assert laminar("start", "--json") == (0, out, "")  # the running broker
    assert laminar("status", "--json") == (0, out, "")
    text = f"Apache Kafka at {status['bootstrap_servers']} (pid {status['pid']}, data in {tmp_path})\n"
    assert laminar("status") == (0, text, "")
    other = 1 + int(status["bootstrap_servers"].rpartition(":")[2])
    code, out, err = laminar("start", "--port", str(other))
    assert (code, out) == (1, "")
    assert err == f"laminar: a broker on {tmp_path} already runs at {status['bootstrap_servers']}; stop it first\n"
    process = psutil.Process(status["pid"])
    assert laminar("stop") == (0, "stopped\n", "")
    assert not is_running(process)
    assert laminar("status")[0] == 1


def test_broker_start_names_port_in_use(laminar: Laminar, broker: Broker) -> None:
    code, out, err = laminar("start", "--port", str(broker.port))
    assert (code, out) == (1, "")
    taken = f"port {broker.port} on 127.0.0.1 is used by another process; choose another, or 0 for a free one"
    assert err == f"laminar: {taken}\n"


def test_broker_names_the_variable_without_a_home(command: Laminar, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "LAMINAR_BROKER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # a container's user without a name
    code, _, err = command("broker", "status")
    assert (code, "no home directory: name a folder, or set LAMINAR_BROKER" in " ".join(err.split())) == (2, True), err
    monkeypatch.setenv("HOME", "/dev/null")
    code, _, err = command("broker", "start")
    assert (code, "name another folder, or set LAMINAR_BROKER" in " ".join(err.split())) == (2, True), err
