"""A local broker that dies while it starts is restarted, within the same limit as one that dies later."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
from kafka import KafkaAdminClient

from infra.kafka.broker import BrokerConfig, BrokerDied, BrokerStartError
from infra.kafka.readiness import TransientError
from pipelines.config import KafkaConfig
from pipelines.run import restarts
from pipelines.run import run_kafka as run_kafka_module
from pipelines.run.run_kafka import RunKafka

DEADLINE_S = 120.0


class Killer(threading.Thread):
    """Kills the next `times` broker processes, each as soon as it exists."""

    def __init__(self, folder: Path, times: int) -> None:
        super().__init__(daemon=True)
        self._file, self._times = folder / "broker.json", times
        self._seen_pids = {self._pid()}
        self.killed = 0

    def run(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while self.killed < self._times and time.monotonic() < deadline:
            if (pid := self._pid()) not in self._seen_pids:
                self._seen_pids.add(pid)
                psutil.Process(pid).send_signal(signal.SIGKILL)
                self.killed += 1
            time.sleep(0.005)

    def _pid(self) -> int:
        try:
            return int(json.loads(self._file.read_text())["pid"])
        except FileNotFoundError:
            return 0


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def kafka(tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[RunKafka]:
    """The Kafka of a run, whose killed broker starts again without waiting 6 s for the end of its session."""
    quick = {"broker.session.timeout.ms": "1500", "broker.heartbeat.interval.ms": "300"}
    monkeypatch.setattr(run_kafka_module, "BrokerConfig", partial(BrokerConfig, overrides=quick))
    made = RunKafka(KafkaConfig(), tmp_path / "kafka", notes.append)
    yield made
    made.close()


def test_run_kafka_restarts_a_broker_killed_while_starting(kafka: RunKafka, tmp_path: Path, notes: list[str]) -> None:
    killer = Killer(tmp_path / "kafka", 1)
    killer.start()
    kafka.start()  # the first start
    killer.join()
    first = json.loads((tmp_path / "kafka" / "broker.json").read_text())["pid"]
    killer = Killer(tmp_path / "kafka", 1)
    killer.start()
    psutil.Process(first).kill()
    deadline = time.monotonic() + DEADLINE_S
    while not (killer.killed and kafka.answers()):
        assert time.monotonic() < deadline
        kafka.poll()
        time.sleep(0.02)
    deaths = [note for note in notes if "has died" in note]
    assert len(deaths) == 3
    assert sum("was ended by SIGKILL while starting" in note for note in deaths) == 2


def test_run_kafka_fails_when_the_broker_never_starts(
    kafka: RunKafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 0.001)
    starts: list[float] = []

    class Broker(run_kafka_module.Broker):
        def start(self, progress: object = None) -> None:
            starts.append(time.monotonic())
            self.config.data_dir.mkdir(exist_ok=True)
            raise BrokerDied("it was ended by SIGKILL while starting; it wrote nothing")

    kafka._own = Broker(run_kafka_module.BrokerConfig(tmp_path / "kafka"))
    with pytest.raises(BrokerStartError, match=r"(?s)died 7 times in 60 s; last error: .*SIGKILL.*broker.log"):
        kafka._start_broker()
    assert len(starts) == 7
    kafka.config = replace(kafka.config, outage_timeout_s=1e-9)
    kafka._restarts = run_kafka_module.Restarts()
    with pytest.raises(BrokerStartError, match=r"kafka\.outage_timeout_s = 1e-09 s"):
        kafka._start_broker()
    kafka._own = None


def test_retry_repeats_a_request_after_the_broker_died(kafka: RunKafka, notes: list[str]) -> None:
    kafka.start()
    pids: list[int] = []

    def request() -> str:
        pids.append(kafka._own._process.pid)
        if len(pids) == 1:
            psutil.Process(pids[0]).send_signal(signal.SIGKILL)
        admin = kafka.config.client().admin()
        with KafkaAdminClient(**admin | {"bootstrap_timeout_ms": 2000}) as client:
            return str(client.list_topics())

    assert kafka.retry(request) == "[]"
    assert len(set(pids)) == 2
    assert any("reading from Kafka again" in note for note in notes)


def test_retry_raises_the_error_of_a_request_that_keeps_failing(kafka: RunKafka) -> None:
    kafka.start()
    calls: list[int] = []

    def request() -> None:
        calls.append(1)
        raise TransientError("moved")

    with pytest.raises(TransientError, match="moved"):
        kafka.retry(request)
    assert len(calls) == run_kafka_module.MAX_RETRIES + 1
