"""Exactly-once output of a pipeline that is killed at any point, any number of times."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from shuffling_pipeline import OUTPUT, PIPELINE, SOURCE
from waiting import until

from infra.kafka.admin import TopicSpec, admin_client, committed_offsets, create_topics
from infra.kafka.broker import Broker, BrokerConfig, start_broker
from infra.kafka.properties import ClientProperties
from infra.processes import is_running
from infra.runners.options import RunnerName
from schemas.codec import decode, encode
from schemas.records import Metric
from schemas.topics import RESTORE, group_name

PROGRAM = Path(__file__).with_name("shuffling_pipeline.py")
REPOSITORY = PROGRAM.parents[3]


def create(client: ClientProperties, run_id: str) -> None:
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(topic.name(run_id), 1) for topic in (SOURCE, OUTPUT, RESTORE)])


class Feeder(threading.Thread):
    """Writes numbered records, about 300 a second, until `stop`."""

    def __init__(self, client: ClientProperties, run_id: str) -> None:
        super().__init__()
        self.count = 0
        self._client, self._topic = client, SOURCE.name(run_id)
        self._stopped = threading.Event()

    def run(self) -> None:
        producer = KafkaProducer(**self._client.producer())
        while not self._stopped.wait(0.01):
            for _ in range(3):
                value, headers = encode(Metric("a", self.count, {}, 0))
                producer.send(self._topic, value, headers=list(headers))
                self.count += 1
        producer.flush()
        producer.close()

    def stop(self) -> int:
        self._stopped.set()
        self.join()
        return self.count


class Outputs:
    """The committed output of a pipeline so far, in order."""

    def __init__(self, client: ClientProperties, run_id: str) -> None:
        self._partition = TopicPartition(OUTPUT.name(run_id), 0)
        self._consumer = KafkaConsumer(**client.consumer(group_id=None, isolation_level="read_committed"))
        self._consumer.assign([self._partition])
        self._consumer.seek_to_beginning(self._partition)
        self.steps: list[int] = []

    def read(self) -> list[int]:
        for records in self._consumer.poll(timeout_ms=50).values():
            self.steps += [row.step for record in records for row in decode(record.value, record.headers)]
        return self.steps

    def read_to_end(self) -> list[int]:
        end = self._consumer.end_offsets([self._partition])[self._partition]
        while self._consumer.position(self._partition) < end:
            self.read()
        return self.steps

    def wait_for(self, count: int, seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while len(set(self.steps)) < count and time.monotonic() < deadline:
            self.read()

    def close(self) -> None:
        self._consumer.close()


class PipelineProcesses:
    """Starts pipelines in separate processes."""

    def __init__(self, launcher: subprocess.Popen[str]) -> None:
        self._launcher = launcher
        self._started: list[psutil.Process] = []

    def start(self, broker: Broker, run_id: str, runner: RunnerName, kill_point: str = "") -> psutil.Process:
        assert self._launcher.stdin is not None
        assert self._launcher.stdout is not None
        print(broker.bootstrap_servers, run_id, runner, kill_point, file=self._launcher.stdin, flush=True)
        self._started.append(psutil.Process(int(self._launcher.stdout.readline())))
        return self._started[-1]

    def kill_all(self) -> None:
        """Kill all processes that still run."""
        while self._started:
            process = self._started.pop()
            if process.is_running():
                process.kill()


@pytest.fixture(scope="module")
def launcher(killed_folder: Path) -> Iterator[subprocess.Popen[str]]:
    changes = {"PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore", "TMPDIR": str(killed_folder)}
    environment = {**os.environ, **changes}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(
        [sys.executable, str(PROGRAM)], text=True, env=environment, cwd=REPOSITORY, **pipes
    ) as launcher:
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "ready\n"
        yield launcher
        launcher.stdin.close()


@pytest.fixture
def processes(launcher: subprocess.Popen[str]) -> Iterator[PipelineProcesses]:
    made = PipelineProcesses(launcher)
    yield made
    made.kill_all()


class Trial:
    """The input of a pipeline, fed during the trial, and its output."""

    def __init__(self, broker: Broker, run_id: str) -> None:
        self.client = ClientProperties(
            {"bootstrap.servers": broker.bootstrap_servers, "reconnect.backoff.max.ms": "500"}
        )
        self._run_id = run_id
        with admin_client(self.client) as admin:
            create_topics(admin, [TopicSpec(topic.name(run_id), 1) for topic in (SOURCE, OUTPUT, RESTORE)])
        self._feeder = Feeder(self.client, run_id)
        self.outputs = Outputs(self.client, run_id)

    def __enter__(self) -> Trial:
        self._feeder.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._feeder.stop()
        self.outputs.close()

    def finish(self, pipeline: psutil.Process) -> None:
        """Let the pipeline finish its input, stop it, and check its whole output."""
        count = self._feeder.stop()
        self.outputs.wait_for(count)
        pipeline.send_signal(signal.SIGTERM)
        pipeline.wait(60)
        steps = self.outputs.read_to_end()
        assert set(range(count)) - set(steps) == set()
        assert len(steps) == count
        assert steps != sorted(steps)
        group = group_name(self._run_id, PIPELINE)
        with admin_client(self.client) as admin:  # drained: a restart has nothing to repeat
            until(lambda: [each.offset for each in committed_offsets(admin, group).values()] == [count])


def kill_at_random(process: psutil.Process, rng: random.Random) -> None:
    time.sleep(rng.uniform(0.05, 1.2))
    process.kill()
    process.wait(10)


def run_campaign(
    processes: PipelineProcesses,
    broker: Broker,
    run_id: str,
    runner: RunnerName,
    kill_points: list[str],
    rng: random.Random,
) -> None:
    with Trial(broker, run_id) as trial:
        for kill_point in kill_points:
            process = processes.start(broker, run_id, runner, kill_point)
            if kill_point:
                process.wait(180)  # it kills itself at that point
            else:
                kill_at_random(process, rng)
            trial.outputs.read()
        trial.finish(processes.start(broker, run_id, runner))


def test_pipeline_writes_exactly_once_if_killed_5_times(
    processes: PipelineProcesses, broker: Broker, run_id: str, runner: RunnerName
) -> None:
    run_campaign(processes, broker, run_id, runner, ["", "before", "after", "", ""], random.Random(1))


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_pipeline_writes_exactly_once_if_killed_25_times(
    processes: PipelineProcesses, broker: Broker, run_id: str, runner: RunnerName
) -> None:
    rng = random.Random(2)
    kill_points = [rng.choice(["", "", "before", "after"]) for _ in range(25)]
    run_campaign(processes, broker, run_id, runner, kill_points, rng)


def test_stopped_process_ends_if_its_successor_is_running(
    processes: PipelineProcesses, broker: Broker, run_id: str, runner: RunnerName
) -> None:
    with Trial(broker, run_id) as trial:
        zombie = processes.start(broker, run_id, runner, "stop")  # within a transaction
        deadline = time.monotonic() + 180
        while zombie.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
            time.sleep(0.02)
        assert zombie.status() == psutil.STATUS_STOPPED
        successor = processes.start(broker, run_id, runner)
        before = len(trial.outputs.read_to_end())
        trial.outputs.wait_for(before + 100)
        zombie.resume()
        zombie.wait(180 if runner == "flink" else 60)  # it ends by itself; Flink retries its steps first
        assert is_running(successor)
        trial.finish(successor)


def test_pipeline_continues_after_a_broker_restart(processes: PipelineProcesses, run_id: str, tmp_path: Path) -> None:
    quick = {"broker.session.timeout.ms": "1500", "broker.heartbeat.interval.ms": "300"}
    with start_broker(BrokerConfig(tmp_path, overrides=quick)) as broker, Trial(broker, run_id) as trial:
        pipeline = processes.start(broker, run_id, "embedded")
        trial.outputs.wait_for(100)
        broker.kill()
        broker.start()
        trial.outputs.wait_for(len(trial.outputs.read_to_end()) + 100)
        assert is_running(pipeline)
        trial.finish(pipeline)
