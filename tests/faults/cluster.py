"""Kafka brokers, each on its own host; of three: replication factor 3, min.insync.replicas 2."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
from faults.network import Network, within

from infra.kafka.broker import java_command
from infra.kafka.broker_jars import JARS
from infra.kafka.properties import ClientProperties
from infra.kafka.readiness import connection_problem
from infra.kafka.storage_format import format_storage, random_id
from infra.processes import is_running, spawn

PORT, CONTROLLER_PORT = 9092, 9093
START_S = 300.0


class Cluster:
    """Brokers on the hosts `names` of `network`, numbered from 1 in that order. Their data is in `folder`."""

    def __init__(self, network: Network, names: tuple[str, ...], folder: Path) -> None:
        self.network, self.names, self.folder = network, names, folder
        self.processes: dict[str, psutil.Process] = {}

    @property
    def client(self) -> ClientProperties:
        """Client properties that work on any host."""
        return self.client_of(*self.names)

    def client_of(self, *names: str) -> ClientProperties:
        """Client properties that connect to the brokers `names` first."""
        return ClientProperties.at(",".join(f"{self.network.hosts[name].address}:{PORT}" for name in names))

    def log_dir(self, name: str) -> Path:
        """The folder of a broker's partitions."""
        return self.folder / name / "log"

    def start(self) -> None:
        """Format the data folders, start all brokers, and wait until they respond."""
        for node, name in enumerate(self.names, 1):
            (self.folder / name).mkdir(parents=True)
            self._properties(name).write_text("".join(f"{k}={v}\n" for k, v in self._settings(node, name).items()))
        cluster = random_id()
        for node, name in enumerate(self.names, 1):
            self._format(node, name, cluster)
            self.start_broker(name)
        self.wait()

    def start_broker(self, name: str) -> None:
        """Start a broker on its data without waiting; see `wait`."""
        command = java_command(192, JARS.class_path(lambda _: None), "kafka.Kafka", str(self._properties(name)))
        log = self.folder / name / "broker.log"
        self.processes[name] = spawn(self.network.command(name, *command), log, die_with_parent=True)

    def wait(self, timeout_s: float = START_S) -> None:
        """Return once every broker responds to clients on its own host. Raises AssertionError."""
        deadline = time.monotonic() + timeout_s
        for name in self.names:
            client = self.client_of(name)
            while within(self.network.hosts[name], lambda client=client: connection_problem(client.admin(), 2.0)):
                log = self.folder / name / "broker.log"
                assert is_running(self.processes[name]), f"{name} died:\n{log.read_text()[-2000:]}"
                assert time.monotonic() < deadline, f"{name} does not respond:\n{log.read_text()[-2000:]}"
                time.sleep(0.2)

    def kill(self, name: str) -> None:
        """Kill a broker, as a power failure of its host."""
        self.processes[name].kill()
        self.processes[name].wait(30)

    def stop(self) -> None:
        """Kill all brokers."""
        for process in self.processes.values():
            try:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait(30)
            except psutil.NoSuchProcess:
                continue

    def _format(self, node: int, name: str, cluster: str) -> None:
        format_storage(self.log_dir(name), str(node), cluster)

    def _properties(self, name: str) -> Path:
        return self.folder / name / "server.properties"

    def _settings(self, node: int, name: str) -> dict[str, object]:
        addresses = {each: self.network.hosts[each].address for each in self.names}
        voters = ",".join(f"{n}@{addresses[each]}:{CONTROLLER_PORT}" for n, each in enumerate(self.names, 1))
        three = ("default", "offsets.topic", "transaction.state.log", "share.coordinator.state.topic")
        return {
            "process.roles": "broker,controller",
            "node.id": node,
            "controller.quorum.voters": voters,
            "listeners": f"PLAINTEXT://{addresses[name]}:{PORT},CONTROLLER://{addresses[name]}:{CONTROLLER_PORT}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": self.log_dir(name).absolute(),
            "auto.create.topics.enable": "false",
            "message.max.bytes": 16 * 1024 * 1024,
            "replica.fetch.max.bytes": 16 * 1024 * 1024,
            **{f"{topic}.replication.factor": min(3, len(self.names)) for topic in three},
            "min.insync.replicas": min(2, len(self.names)),
            "transaction.state.log.min.isr": min(2, len(self.names)),
            "offsets.topic.num.partitions": 4,
            "transaction.state.log.num.partitions": 4,
            "num.network.threads": 2,
            "num.io.threads": 4,
            "background.threads": 2,
            "log.cleaner.dedupe.buffer.size": 8 * 1024 * 1024,
            "group.initial.rebalance.delay.ms": 0,
            "broker.heartbeat.interval.ms": 1000,
            "broker.session.timeout.ms": 6000,
            "replica.lag.time.max.ms": 5000,
        }
