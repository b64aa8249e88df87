"""Nothing is lost and nothing comes twice, however often and wherever a pipeline is killed."""

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

from infra.kafka.admin import TopicSpec, admin_client, committed_offsets, create_topics
from infra.kafka.broker import Broker, BrokerConfig, start_broker
from infra.kafka.properties import ClientProperties
from infra.runners.options import Runner
from schemas.codec import decode, encode
from schemas.records import Metric
from schemas.topics import RESTORE, group_name

PROGRAM = Path(__file__).with_name("shuffling_pipeline.py")
REPOSITORY = PROGRAM.parents[3]


def create(client: ClientProperties, run_id: str) -> None:
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(topic.name(run_id), 1) for topic in (SOURCE, OUTPUT, RESTORE)])


class Feeder(threading.Thread):
    """Writes numbered records, about 300 a second, until it is told to stop."""

    def __init__(self, client: ClientProperties, run_id: str) -> None:
        super().__init__()
        self.count = 0
        self._client, self._topic = client, SOURCE.name(run_id)
        self._over = threading.Event()

    def run(self) -> None:
        producer = KafkaProducer(**self._client.producer())
        while not self._over.wait(0.01):
            for _ in range(3):
                value, headers = encode(Metric("a", self.count, {}, 0))
                producer.send(self._topic, value, headers=list(headers))
                self.count += 1
        producer.flush()
        producer.close()

    def stop(self) -> int:
        self._over.set()
        self.join()
        return self.count


class Outputs:
    """What a pipeline has written and committed so far, in order."""

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

    def wait_for(self, count: int, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while len(set(self.steps)) < count and time.monotonic() < deadline:
            self.read()

    def close(self) -> None:
        self._consumer.close()


class Nursery:
    """Starts pipelines in processes of their own."""

    def __init__(self, parent: subprocess.Popen[str]) -> None:
        self._parent = parent
        self._started: list[psutil.Process] = []

    def start(self, broker: Broker, run_id: str, runner: Runner, suicide: str = "") -> psutil.Process:
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        print(broker.bootstrap_servers, run_id, runner, suicide, file=self._parent.stdin, flush=True)
        self._started.append(psutil.Process(int(self._parent.stdout.readline())))
        return self._started[-1]

    def end(self) -> None:
        """Kill what is left."""
        while self._started:
            process = self._started.pop()
            if process.is_running():
                process.kill()


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore"}
    environment["TMPDIR"] = str(tmp_path_factory.mktemp("killed"))  # a killed process leaves its temporary files
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(
        [sys.executable, str(PROGRAM)], text=True, env=environment, cwd=REPOSITORY, **pipes
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        yield parent
        parent.stdin.close()


@pytest.fixture
def nursery(parent: subprocess.Popen[str]) -> Iterator[Nursery]:
    made = Nursery(parent)
    yield made
    made.end()


class Trial:
    """A pipeline's input, which flows while the trial lasts, and its output."""

    def __init__(self, broker: Broker, run_id: str) -> None:
        self.client = ClientProperties.at(broker.bootstrap_servers).updated({"reconnect.backoff.max.ms": "500"})
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

    def end(self, pipeline: psutil.Process) -> None:
        """Let the pipeline finish what there is, ask it to stop, and look at all that it has written."""
        count = self._feeder.stop()
        self.outputs.wait_for(count)
        pipeline.send_signal(signal.SIGTERM)
        pipeline.wait(5)
        steps = self.outputs.read_to_end()
        assert set(range(count)) - set(steps) == set()
        assert len(steps) == count
        assert steps != sorted(steps)
        with admin_client(self.client) as admin:
            (committed,) = committed_offsets(admin, group_name(self._run_id, PIPELINE)).values()
        assert committed.offset == count  # drained: nothing is left to be done again


def kill_at_random(process: psutil.Process, rng: random.Random) -> None:
    time.sleep(rng.uniform(0.05, 1.2))
    process.kill()
    process.wait(10)


def campaign(
    nursery: Nursery, broker: Broker, run_id: str, runner: Runner, moments: list[str], rng: random.Random
) -> None:
    with Trial(broker, run_id) as trial:
        for moment in moments:
            process = nursery.start(broker, run_id, runner, moment)
            if moment:
                process.wait(30)  # it kills itself
            else:
                kill_at_random(process, rng)
            trial.outputs.read()
        trial.end(nursery.start(broker, run_id, runner))


def test_killed_five_times(nursery: Nursery, broker: Broker, run_id: str, runner: Runner) -> None:
    campaign(nursery, broker, run_id, runner, ["", "before", "after", "", ""], random.Random(1))


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_killed_twenty_five_times(nursery: Nursery, broker: Broker, run_id: str, runner: Runner) -> None:
    rng = random.Random(2)
    moments = [rng.choice(["", "", "before", "after"]) for _ in range(25)]
    campaign(nursery, broker, run_id, runner, moments, rng)


def test_a_stopped_process_ends_when_it_finds_its_successor_at_work(
    nursery: Nursery, broker: Broker, run_id: str, runner: Runner
) -> None:
    with Trial(broker, run_id) as trial:
        zombie = nursery.start(broker, run_id, runner, "stop")  # within a transaction
        deadline = time.monotonic() + 30
        while zombie.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
            time.sleep(0.02)
        successor = nursery.start(broker, run_id, runner)
        before = len(trial.outputs.read_to_end())
        trial.outputs.wait_for(before + 100)
        zombie.resume()
        zombie.wait(180 if runner == "flink" else 15)  # it ends by itself; Flink has its steps tried again first
        assert successor.is_running()
        trial.end(successor)


def test_a_broker_that_dies_and_comes_back(nursery: Nursery, run_id: str, tmp_path: Path) -> None:
    quick = {"broker.session.timeout.ms": "1500", "broker.heartbeat.interval.ms": "300"}
    with start_broker(BrokerConfig(tmp_path, overrides=quick)) as broker, Trial(broker, run_id) as trial:
        pipeline = nursery.start(broker, run_id, "embedded")
        trial.outputs.wait_for(100)
        broker.kill()
        broker.start()
        trial.outputs.wait_for(len(trial.outputs.read_to_end()) + 100)
        assert pipeline.is_running()
        trial.end(pipeline)
