"""The local broker: it serves, keeps its data, says why it cannot start, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

import psutil
import pytest
from kafka import KafkaAdminClient, KafkaProducer
from waiting import until

from infra.kafka.admin import admin_client
from infra.kafka.broker import (
    Broker,
    BrokerConfig,
    BrokerStartError,
    _other_port,
    free_port,
    running_broker,
    start_broker,
)
from infra.kafka.detached_broker import last_port
from infra.kafka.settings_check import broker_problems, broker_settings
from infra.processes import is_running

# A dead broker's session must run out before its successor may register: short, so that the tests are.
QUICK = {"broker.session.timeout.ms": "1500", "broker.heartbeat.interval.ms": "300"}
REPOSITORY = Path(__file__).parents[3]


def write(broker: Broker, topic: str, value: bytes) -> int:
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers, acks="all", max_request_size=16 << 20)
    try:
        return producer.send(topic, value).get(timeout=20).offset
    finally:
        producer.close()


def create(broker: Broker, topic: str) -> None:
    with KafkaAdminClient(bootstrap_servers=broker.bootstrap_servers) as admin:
        admin.create_topics({topic: {"num_partitions": 1}}, wait_for_metadata=True)


def test_broker_data_folder_is_private(broker: Broker) -> None:
    assert broker.config.data_dir.stat().st_mode & 0o777 == 0o700
    assert (broker.config.data_dir / "server.properties").stat().st_mode & 0o777 == 0o600
    assert broker.log_file.stat().st_mode & 0o077 == 0


def test_broker_accepts_records_of_eight_megabytes(broker: Broker, run_id: str) -> None:
    create(broker, run_id)
    assert write(broker, run_id, os.urandom(8 << 20)) == 0


def test_broker_does_not_create_topics_on_use(broker: Broker, run_id: str) -> None:
    with KafkaAdminClient(bootstrap_servers=broker.bootstrap_servers) as admin:
        create(broker, run_id)
        admin.describe_topics([f"{run_id}-misspelt"])
        assert run_id in admin.list_topics()
        assert f"{run_id}-misspelt" not in admin.list_topics()


def test_broker_keeps_data_and_port_after_restart_and_kill(tmp_path: Path) -> None:
    with start_broker(BrokerConfig(tmp_path, overrides=QUICK)) as broker:
        address, first = broker.bootstrap_servers, broker.pid
        create(broker, "kept")
        assert write(broker, "kept", b"a") == 0
        with admin_client(broker.client()) as admin:
            assert broker_problems(broker_settings(admin), transaction_timeout_s=3600) == [], "the largest setting"
        broker.restart()
        assert write(broker, "kept", b"b") == 1
        broker.kill()
        assert not broker.is_alive()
        broker.start()
        assert write(broker, "kept", b"c") == 2
        assert (broker.bootstrap_servers, broker.pid != first) == (address, True)
        broker.stop(timeout=60.0)
        assert broker._how_it_ended() == "ended with code 143"  # Java's after SIGTERM: it is not killed
        assert not broker.is_alive()


def test_start_rejects_second_broker_on_a_folder(broker: Broker) -> None:
    with pytest.raises(BrokerStartError, match=rf"pid {broker.pid}\) already runs on"):
        start_broker(BrokerConfig(broker.config.data_dir))
    assert broker.is_alive()


def test_start_names_used_port(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(BrokerStartError, match=f"port {port} on 127.0.0.1 is used"):
            start_broker(BrokerConfig(tmp_path, port=port))


def test_broker_starts_in_any_folder_and_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    with start_broker(BrokerConfig(tmp_path / "läufe" / r"a\tb 🎉", secure=True)) as broker:
        assert (broker.config.data_dir / "log" / "__cluster_metadata-0").is_dir()


def test_start_refuses_a_folder_with_a_comma(tmp_path: Path) -> None:
    with pytest.raises(BrokerStartError, match=r"takes the folder .*/a,b for several, at its comma"):
        start_broker(BrokerConfig(tmp_path / "a,b"))
    assert not (tmp_path / "a,b").exists()


@pytest.mark.parametrize("text", ["", "{", "null", "{}", '{"pid": "x", "bootstrap_servers": "x"}'])
def test_damaged_broker_file_is_as_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "broker.json").write_text(text)
    assert running_broker(tmp_path) is None
    assert last_port(tmp_path) == 0


def test_start_shows_log_of_dead_broker(tmp_path: Path) -> None:
    config = BrokerConfig(tmp_path, overrides={"num.io.threads": "0"})
    with pytest.raises(BrokerStartError, match=r"(?s)num\.io\.threads"):
        start_broker(config)


def test_start_shows_log_of_broker_dead_after_format(tmp_path: Path) -> None:
    with start_broker(BrokerConfig(tmp_path)):
        pass
    (tmp_path / "log" / "meta.properties").write_text("version=1\ncluster.id=other\nnode.id=7\n")
    with pytest.raises(BrokerStartError, match=r"(?s)ended with code 1 while starting.*node.*7"):
        start_broker(BrokerConfig(tmp_path))


def test_start_kills_broker_after_timeout(tmp_path: Path) -> None:
    with pytest.raises(BrokerStartError, match="did not respond within 0 s"):
        start_broker(BrokerConfig(tmp_path, start_timeout_s=0.0))
    here = str(tmp_path / "server.properties")
    assert not [process for process in psutil.process_iter(["cmdline"]) if here in (process.info["cmdline"] or [])]


def test_broker_ends_with_its_owner(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from infra.kafka.broker import *;"
        "broker = start_broker(BrokerConfig(Path(sys.argv[1]))); print(broker.pid, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as owner:
        assert owner.stdout is not None
        broker = psutil.Process(int(owner.stdout.readline()))
        assert is_running(broker)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        until(lambda: not is_running(broker))


def test_broker_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    started: list[Broker] = []
    worker = threading.Thread(target=lambda: started.append(start_broker(BrokerConfig(tmp_path))))
    worker.start()
    worker.join()
    with started[0] as broker:
        time.sleep(0.3)
        assert broker.is_alive()


def test_free_port_is_below_the_ephemeral_range() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(free_port() for _ in range(50)) < lowest


def test_process_never_draws_a_port_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    class Repeating:
        def __init__(self) -> None:
            self.drawn = iter([20_003, 20_003, 20_004])

        def randrange(self, first: int, end: int) -> int:
            return next(self.drawn)

    monkeypatch.setattr("infra.kafka.broker.port_is_free", lambda port: True)
    monkeypatch.setattr("random.SystemRandom", Repeating)
    monkeypatch.setattr("infra.kafka.broker._DRAWN", deque(maxlen=1000))
    assert [free_port(), free_port()] == [20_003, 20_004]


def test_controller_never_has_the_port_of_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([20_000, 20_000, 20_001])
    monkeypatch.setattr("infra.kafka.broker.free_port", lambda: next(drawn))
    assert _other_port(20_000) == 20_001
