"""An emulated run on brokers and hosts of roles, with a nemesis, and the anomalies of its log."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import tomli_w
from faults.cluster import Cluster
from faults.host_clock import VARIABLE
from faults.late_run import CONFIG, SHARDS, autoscaling_section, relay_section, run_inputs
from faults.log_files import LoggedRecord, read_topic
from faults.nemesis import Injected, Nemesis
from faults.network import Network, within
from faults.run_anomalies import RunLog, committed_offsets, run_anomalies, settled_anomalies
from kafka import KafkaConsumer, TopicPartition

from infra.processes import is_running, spawn
from pipelines.config import Config, load_config
from pipelines.inspect.audit.audit_run import audit
from pipelines.inspect.audit.result import Audit
from pipelines.run.topics import make_topics

BROKERS = ("k1", "k2", "k3")
ROLES = {
    "r1": ("autoscaler", "prompts", "placement", "score", "evaluation"),
    "r2": ("rollout-0", "experience", "experience-1", "trainer", "relay-0", "gateway-0", "agents-0"),
}
READ_BACK = ("prompts", "inbox", "trajectories", "experiences", "settled", "batches", "metrics")
"""Topics that a consumer reads back: it must receive exactly the committed records of the log."""
AFTERWARDS = 3
"""Batches that must follow the last fault."""
RECOVERS_S = 400.0


@dataclass
class Survived:
    """The results of a run under faults."""

    faults: list[Injected] = field(default_factory=list)
    restarts: int = 0
    """Processes of roles that ended by themselves and were restarted."""
    trained: int = 0
    batches: int = 0
    recovered_s: float = 0.0
    """Seconds from the last fault to the next batches."""
    anomalies: list[str] = field(default_factory=list)


class ClusterRun:
    """The brokers on the hosts `brokers` of `network` and the roles of one run on others; their files are in `folder`.

    `changes` are settings by section. The time of day of a host is `clocks` seconds ahead.
    """

    def __init__(
        self,
        network: Network,
        folder: Path,
        run: str,
        brokers: tuple[str, ...] = BROKERS,
        hosts: Mapping[str, Sequence[str]] = ROLES,
        changes: Mapping[str, Mapping[str, Any]] | None = None,
        clocks: Mapping[str, float] | None = None,
    ) -> None:
        self.network, self.folder, self.run = network, folder, run
        self.cluster = Cluster(network, brokers, folder)
        self.hosts, self.changes, self.clocks = hosts, changes or {}, clocks or {}
        self.roles: dict[str, psutil.Process] = {}
        self.restarts = 0

    def start(self) -> None:
        """Start brokers, topics and roles; return once two batches are written."""
        self.cluster.start()
        self.config = self._config()
        within(self.network.hosts[next(iter(self.hosts))], lambda: make_topics(self.config))
        for host in self.hosts:
            self.start_roles(host)
        self.until(lambda: self.batches() >= 2, "first batches")

    def start_roles(self, host: str) -> None:
        """Start the process of a host's roles."""
        script = str(Path(__file__).with_name("role_host.py"))
        clock = f"{VARIABLE}={self.clocks.get(host, 0.0)}"
        command = ["env", clock, sys.executable, "-W", "ignore", script, str(self._file), *self.hosts[host]]
        self.roles[host] = spawn(
            self.network.command(host, *command), self.folder / f"{host}.log", die_with_parent=True
        )

    def process_of(self, host: str) -> psutil.Process:
        return self.roles[host] if host in self.roles else self.cluster.processes[host]

    def restart(self, host: str) -> None:
        if host in self.roles:
            self.start_roles(host)
        else:
            self.cluster.start_broker(host)

    def batches(self) -> int:
        """The number of rows of the batches topic, on the broker with the most."""
        names = self.cluster.names
        return max(RunLog(self.cluster.log_dir(name), self.run).count("batches", "MicroBatch") for name in names)

    def until(self, condition: Callable[[], bool], what: str) -> float:
        """Seconds until `condition` holds; processes of roles that end meanwhile are restarted."""
        began = time.monotonic()
        while not condition():
            self._respawn()
            assert time.monotonic() - began < RECOVERS_S, f"no {what} within {RECOVERS_S:g} s\n{self.logs()}"
            time.sleep(0.2)
        return time.monotonic() - began

    def nemesis(self, seed: int) -> Nemesis:
        """What injects faults into this run."""
        return Nemesis(seed, self.network, self.cluster, self.process_of, self.restart)

    def under(self, faults: Iterable[tuple[str | None, str | None]], seed: int) -> Survived:
        """Inject `faults` (kind and host, any where None), let the run recover, stop it, and check its log."""
        nemesis, injected = self.nemesis(seed), list[Injected]()
        for kind, host in faults:
            self._respawn()
            injected.append(nemesis.inject(kind, host))
            nemesis.pause_between()
        return self.end(injected)

    def end(self, faults: Sequence[Injected] = ()) -> Survived:
        """Let the run recover from `faults`, stop it, and check its log."""
        survived = Survived(list(faults))
        self.cluster.wait()
        before = self.batches()
        survived.recovered_s = round(self.until(lambda: self.batches() >= before + AFTERWARDS, "more batches"), 1)
        self.until(lambda: bool(self.trained()), "a trained batch")
        self._stop_roles()
        survived.anomalies = self._check()
        log = self.log
        survived.batches = len({row["batch"] for _, _, row in log.rows("batches", "MicroBatch")})
        survived.trained = len(self.trained())
        survived.restarts = self.restarts
        return survived

    def trained(self) -> set[int]:
        """The batches that the versions in the log were trained with."""
        return {batch for _, _, row in self.log.rows("relay", "WeightVersion") for batch in row["batches"]}

    @property
    def log(self) -> RunLog:
        """The run's log on the first broker."""
        return RunLog(self.cluster.log_dir(self.cluster.names[0]), self.run)

    def audit(self) -> Audit:
        """The audit of the run, read on the first host of roles."""
        host, timeout_s = self.network.hosts[next(iter(self.hosts))], self.config.kafka.transaction_timeout_s
        return within(host, lambda: audit(self.cluster.client, self.run, transaction_timeout_s=timeout_s))

    def logs(self) -> str:
        """The last log lines of the roles' processes."""
        return "\n".join(f"{host}: {(self.folder / f'{host}.log').read_text()[-2500:]}" for host in self.roles)

    def stop(self) -> None:
        """Kill everything."""
        for process in self.roles.values():
            if is_running(process):
                process.resume()
                process.kill()
                process.wait(30)
        self.cluster.stop()

    def _respawn(self) -> None:
        for host, process in list(self.roles.items()):
            if not is_running(process):
                self.restarts += 1
                self.start_roles(host)

    def _stop_roles(self) -> None:
        for process in self.roles.values():
            process.terminate()
        for process in self.roles.values():
            process.wait(90)

    def _check(self) -> list[str]:
        host = self.network.hosts[next(iter(self.hosts))]
        servers = self.cluster.client.bootstrap_servers
        committed = within(host, lambda: committed_offsets(servers, self.run, run_inputs(self.config)))
        found = settled_anomalies(lambda: [*self._replicas(), *run_anomalies(self.log, committed, SHARDS)])
        return found + within(host, lambda: self._read_back(servers))

    def _replicas(self) -> list[str]:
        """Check that every topic is equal on all brokers, without open transactions."""
        found = []
        for short_name in READ_BACK:
            topic = f"laminar.{self.run}.{short_name}"
            first, *others = (read_topic(self.cluster.log_dir(name), topic) for name in self.cluster.names)
            differ = [name for name, other in zip(self.cluster.names[1:], others, strict=True) if other != first]
            found += [f"inconsistent offsets: {short_name} differs on {name}" for name in differ]
            hanging = {record.producer for record in first if record.outcome == "open"}
            found += [f"hanging transaction: of producer {producer} in {short_name}" for producer in sorted(hanging)]
        return found

    def _read_back(self, servers: str) -> list[str]:
        """Check that a read_committed consumer receives every committed record, and no other."""
        found = []
        for short_name in READ_BACK:
            topic = f"laminar.{self.run}.{short_name}"
            logged = read_topic(self.cluster.log_dir(self.cluster.names[0]), topic)
            outcomes = {(record.partition, record.offset): record.outcome for record in logged}
            seen = set(_visible(servers, topic, logged))
            for place, outcome in outcomes.items():
                if place in seen and outcome != "committed":
                    found.append(f"G1a aborted read: {short_name} {place} is {outcome}, but a consumer received it")
                if place not in seen and outcome == "committed":
                    found.append(f"unseen: {short_name} {place} is committed, but no consumer received it")
        return found

    def _config(self) -> Config:
        self._file = self.folder / "run.toml"
        sections: dict[str, Any] = {
            **CONFIG,
            "run": {"time_scale": 40.0, "name": self.run, "folder": str(self.folder)},
            "kafka": {"bootstrap_servers": self.cluster.client.bootstrap_servers, "partitions": SHARDS},
            "relay": {**relay_section(self.folder), "store": str(self.folder / "weights")},
            "autoscaling": autoscaling_section(self.folder / "prices.csv"),
        }
        changed = {name: {**sections.get(name, {}), **changes} for name, changes in self.changes.items()}
        self._file.write_text(tomli_w.dumps({**sections, **changed}))
        return load_config(self._file)


def _visible(servers: str, topic: str, logged: list[LoggedRecord]) -> list[tuple[int, int]]:
    """Partition and offset of records that a read_committed consumer receives, up to the last of `logged` or 20 s."""
    last: dict[int, int] = {}
    for record in logged:
        if record.outcome == "committed":
            last[record.partition] = record.offset
    reader = KafkaConsumer(bootstrap_servers=servers, group_id=None, isolation_level="read_committed")
    try:
        reader.assign([TopicPartition(topic, partition) for partition in last])
        reader.seek_to_beginning()
        seen: list[tuple[int, int]] = []
        moved_at = time.monotonic()
        while any(reader.position(TopicPartition(topic, p)) <= end for p, end in last.items()):
            polled = [record for records in reader.poll(timeout_ms=200).values() for record in records]
            seen += [(record.partition, record.offset) for record in polled]
            moved_at = time.monotonic() if polled else moved_at
            if time.monotonic() - moved_at > 20:
                break
        return seen
    finally:
        reader.close(autocommit=False)


def survive(
    folder: Path, run: str, seed: int, faults: Iterable[tuple[str | None, str | None]], keep: bool = True
) -> Survived:
    """Run a whole run under `faults`. Raises NoNetwork if namespaces cannot be used."""
    with Network((*BROKERS, *ROLES), seed) as network:
        at_work = ClusterRun(network, folder, run)
        try:
            at_work.start()
            return at_work.under(faults, seed)
        finally:
            at_work.stop()
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)
