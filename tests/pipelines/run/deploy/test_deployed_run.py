"""The example's manifests, executed: each container as a process with exactly the network, mounts, rights and
environment that its manifest gives it, to a passed audit.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pyarrow.parquet as pq
import pytest
import yaml
from deployments import resources, write_example
from end_to_end.small_runs import SMALL, make_model
from faults.cluster import Cluster as Brokers
from faults.network import Network, within
from faults.without_network import skipped_without_network
from pods import Cluster, Container, Pod, given_to, until_all

from infra.certificates import write_relay_files
from infra.deploy.kubernetes.pods import USER
from infra.deploy.plan import METRICS_PORT
from infra.kafka.topic_reader import read_topic
from infra.store.names import default_root, version_of
from infra.store.ownership import open_folder
from pipelines.run.deployment import files_of, plan_of
from schemas.records import Experience, RelayChain, RelayStatus, Trajectory, WeightVersion
from schemas.topics import DEAD_LETTERS, EXPERIENCES, RELAY, RELAY_CHAIN, REPLICAS, TRAJECTORIES

STEPS = 3
NODES = ("n1", "n2")
START_S = 400.0
NOTICE_S = 30.0
"""Of an eviction, in which a rollout hands its trajectories over."""
SETTINGS: dict[str, Any] = {
    **SMALL,
    "kafka": {"replication_factor": 1},
    "run": {**SMALL["run"], "audit_every_s": 5.0},
    "trainer": {"optimizer_steps": 1000, "checkpoint_every": 2},
    "rollout": {**SMALL["rollout"], "termination_notice_s": NOTICE_S},
    "evaluation": {"every": 1},
}


class Deployed:
    """The pods of the example on a cluster of two nodes, with a Kafka that they reach as kafka:9092."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._folder = folder
        self._documents = self._deploy()
        pods = [name for document in self._documents for name in _pods_of(document)]
        hosts = {name: f"p{number}" for number, name in enumerate(pods)}
        self._network = stack.enter_context(Network(("kafka", *hosts.values())))
        self._brokers = Brokers(self._network, ("kafka",), folder / "brokers")
        stack.callback(self._brokers.stop)
        self._brokers.start()
        nodes = {}
        for node in NODES:
            nodes[node] = Path("/dev/shm") / f"{folder.name}-{os.getpid()}-{node}"
            nodes[node].mkdir()
            nodes[node].chmod(0o1777)
            stack.callback(shutil.rmtree, nodes[node], ignore_errors=True)
        self.ended = default_root("ended", nodes[NODES[1]])
        open_folder(self.ended).release()
        for path in (*self.ended.iterdir(), self.ended):
            os.chown(path, USER, USER)
            os.utime(path, (1, 1))
        (folder / "pods").mkdir()
        name = f"laminar-{self.run}"
        self._cluster = Cluster(
            self._network,
            folder / "pods",
            config_maps={name: self._config_map(name)},
            secrets={f"{name}-relay-files": self._relay_files()},
            claims={name: self._volume()},
            nodes=nodes,
            names={"kafka": self._network.hosts["kafka"].address},
        )
        self.pods: list[Pod] = []
        for document in self._documents:
            for index, pod in enumerate(_pods_of(document)):
                template, node = document["spec"]["template"], NODES[index % len(NODES)]
                host = self._network.hosts[hosts[pod]]
                self.pods.append(Pod(self._cluster, pod, template, index, node, host))
        stack.callback(lambda: [each.kill() for each in self.containers()])

    @property
    def run(self) -> str:
        return self._plan.run

    def containers(self, kind: str = "") -> list[Container]:
        """The containers of the pods whose name contains `kind`."""
        return [each for pod in self.pods if kind in pod.name for each in pod.containers]

    def rows(self, topic: Any) -> list[Any]:
        """All rows of a topic."""
        client, host = self._brokers.client, self._network.hosts["kafka"]
        return within(host, lambda: [row for each in read_topic(client, topic.name(self.run)) for row in each.rows])

    def on_another_host(self, work: Callable[[], str]) -> str:
        """The result of `work` on Kafka's machine."""
        return within(self._network.hosts["kafka"], work)

    def laminar(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `laminar` on Kafka's machine."""
        address = f"{self._network.hosts['kafka'].address}:9092"
        command = self._network.command("kafka", str(Path(sys.executable).parent / "laminar"), *words, "-b", address)
        return subprocess.run(command, capture_output=True, text=True, cwd=self._folder, timeout=200, check=False)

    def _deploy(self) -> list[dict[str, Any]]:
        self._plan = plan_of(write_example(self._folder, SETTINGS))
        files = files_of(self._plan)
        documents = [*resources(files), *yaml.safe_load_all(files["kubernetes/export.yaml"])]
        return [each for each in documents if "template" in each.get("spec", {})]

    def _config_map(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir()
        shutil.copy(self._folder / "run.toml", folder)
        folder.chmod(0o755)
        (folder / "run.toml").chmod(0o644)
        return folder

    def _relay_files(self) -> Path:
        write_relay_files(self._folder / "relay")
        (self._folder / "relay" / "ca.key").unlink()
        return self._folder / "relay"

    @property
    def volume(self) -> Path:
        """The folder that is the claimed volume."""
        return self._folder / "volume"

    def _volume(self) -> Path:
        make_model(self.volume / "model", layers=1)
        return given_to(USER, self.volume)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with skipped_without_network(), ExitStack() as stack:
        yield Deployed(stack, tmp_path_factory.mktemp("deployed"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_deployed_example_runs_to_a_passed_audit(deployed: Deployed) -> None:
    (topics,) = deployed.containers("-topics")
    topics.start()
    assert topics.wait(START_S) == 0, topics.log.read_text()

    (late,), (metrics,), (export,) = (deployed.containers(kind) for kind in ("-rollout-1", "-metrics", "-export"))
    roles = [each for each in deployed.containers() if each not in (topics, metrics, export)]
    first = [each for each in roles if each is not late]
    for each in (*first, metrics):
        each.start()
    until_all(first, "readinessProbe", START_S)
    _until(lambda: _versions(deployed) > 1, first)
    late.start()  # on the other machine, which the run has not used so far
    for probe in ("readinessProbe", "startupProbe", "livenessProbe"):
        until_all(roles, probe, START_S)

    _until(lambda: _versions(deployed) > STEPS and _generating(deployed) == {0, 1}, roles)
    _check_the_tier(deployed)
    for index in (1, 0):  # the second one is the trainer's
        _lose_memory(deployed, index, roles)
    assert late.evict(NOTICE_S) == 0, late.log.read_text()[-3000:]  # its StatefulSet starts it again
    late.start()
    until_all([late], "readinessProbe", START_S)
    _until(lambda: _exported(deployed, "laminar_audit_passed") == 1.0, [*roles, metrics])

    for each in (*roles, metrics):
        each.send(signal.SIGTERM)
    assert metrics.wait(90) == 128 + signal.SIGTERM
    for each in roles:
        assert each.wait(90) == 0, f"{each.name}:\n{each.log.read_text()[-3000:]}"
    assert deployed.rows(DEAD_LETTERS) == []
    audit = deployed.laminar("runs", "audit", "--run", deployed.run)
    assert audit.returncode == 0, audit.stdout + audit.stderr
    export.start()
    assert export.wait(START_S) == 0, export.log.read_text()[-3000:]
    exported = pq.read_table(deployed.volume / "exports" / deployed.run / "experiences" / "data")
    assert exported.num_rows == len([row for row in deployed.rows(EXPERIENCES) if isinstance(row, Experience)])


def _until(condition: Callable[[], bool], roles: list[Container]) -> None:
    """Wait until `condition` holds, while all `roles` run."""
    deadline = time.monotonic() + START_S
    while not condition():
        assert all(each.running for each in roles)
        assert time.monotonic() < deadline
        time.sleep(0.5)


def _versions(deployed: Deployed) -> int:
    return len({row.version for row in deployed.rows(RELAY) if isinstance(row, WeightVersion)})


def _generating(deployed: Deployed) -> set[int]:
    """The replicas that have finished a trajectory."""
    return {row.replica for row in deployed.rows(TRAJECTORIES) if isinstance(row, Trajectory)}


def _exported(deployed: Deployed, name: str) -> float | None:
    """The value of a metric that the exporter's pod serves to other machines; None before the first."""
    (pod,) = (each for each in deployed.pods if "-metrics" in each.name)

    def read() -> str:
        with urlopen(f"http://{pod.host.address}:{METRICS_PORT}/metrics", timeout=30) as reply:
            text: str = reply.read().decode()
            return text

    try:
        found = re.search(rf"^{name}{{.*}} (\S+)$", deployed.on_another_host(read), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else float(found[1])


def _check_the_tier(deployed: Deployed) -> None:
    """Each machine's relay has its pod's address and a place in the chain; its store, in memory, has versions."""
    statuses = {row.relay: row for row in deployed.rows(REPLICAS) if isinstance(row, RelayStatus)}
    assert {row.host for row in statuses.values()} == set(NODES)
    addresses = {f"{pod.host.address}:7400" for pod in deployed.pods if "-relay" in pod.name}
    assert {row.address for row in statuses.values()} == addresses
    chain = [row for row in deployed.rows(RELAY_CHAIN) if isinstance(row, RelayChain)][-1]
    assert {link.relay for link in chain.links} == statuses.keys()
    assert not deployed.ended.exists(), "the weights of an ended run stay in the machine's memory"
    for folder in deployed._cluster.nodes.values():
        files = (folder / default_root(deployed.run).name).iterdir()
        assert [each.name for each in files if version_of(each.name)]


def _lose_memory(deployed: Deployed, index: int, roles: list[Container]) -> None:
    """A node loses the files of its store: new versions arrive there, its rollout uses them, and no role ends."""
    store = deployed._cluster.nodes[NODES[index]] / default_root(deployed.run).name
    before, lost = {each for each in store.iterdir() if version_of(each.name)}, _versions(deployed)
    for file in store.iterdir():
        file.unlink(missing_ok=True)
    _until(lambda: bool({each for each in store.iterdir() if version_of(each.name)} - before), roles)
    _until(lambda: _newest_used(deployed, index) >= lost, roles)


def _newest_used(deployed: Deployed, replica: int) -> int:
    """The number of the newest version with which a replica has finished a trajectory."""
    rows = (row for row in deployed.rows(TRAJECTORIES) if isinstance(row, Trajectory) and row.replica == replica)
    return max((each.policy_version.number for each in rows if each.policy_version is not None), default=-1)


def _pods_of(document: dict[str, Any]) -> list[str]:
    name, spec = document["metadata"]["name"], document["spec"]
    if document["kind"] == "DaemonSet":
        return [f"{name}-{node}" for node in NODES]
    return [f"{name}-{index}" for index in range(spec.get("replicas", 1))]
