"""The example's compose file, executed: each service as a process with exactly the network, mounts, rights and
environment that the file gives it, to a passed audit. Kafka has the settings of the file, as its image reads them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from signal import SIGTERM
from typing import Any
from urllib.request import urlopen

import pytest
import yaml
from deployments import write_example
from end_to_end.small_runs import SMALL, make_model
from faults.network import Network, within
from faults.without_network import skipped_without_network
from pods import Cluster, Container, Pod, given_to

from infra.certificates import write_relay_files
from infra.deploy.kubernetes.pods import USER
from infra.deploy.plan import METRICS_PORT
from infra.kafka.broker import java_command
from infra.kafka.broker_jars import JARS
from infra.kafka.storage_format import format_storage
from infra.processes import spawn
from pipelines.run.deployment import files_of, plan_of

STEPS = 3
START_S = 400.0
MACHINE = "machine"
SETTINGS: dict[str, Any] = {
    **SMALL,
    "run": {**SMALL["run"], "audit_every_s": 5.0},
    "trainer": {"optimizer_steps": 1000, "checkpoint_every": 2},
    "evaluation": {"every": 1},
}
_VOLUMES: dict[str, dict[str, Any]] = {
    "./run.toml": {"configMap": {"name": "config"}},
    "./secrets": {"persistentVolumeClaim": {"claimName": "secrets"}},
    "laminar": {"persistentVolumeClaim": {"claimName": "laminar"}},
    "/dev/shm": {"hostPath": {"path": "/dev/shm"}},
}
"""What the sources of a compose file's mounts are in the words of a pod."""


def as_pod(name: str, service: Mapping[str, Any]) -> dict[str, Any]:
    """The template of a pod that is what the compose file says of `service`, as the user of the image."""
    volumes, mounts = [], []
    for number, (source, target, *options) in enumerate(each.split(":") for each in service["volumes"]):
        volumes.append({"name": f"v{number}", **_VOLUMES[source]})
        target = str(Path(target).parent) if source.endswith(".toml") else target  # the file is alone in its folder
        mounts.append({"name": f"v{number}", "mountPath": target, "readOnly": options == ["ro"]})
    for path in service["tmpfs"]:
        volumes.append({"name": "tmp", "emptyDir": {}})
        mounts.append({"name": "tmp", "mountPath": path})
    container = {
        "name": name,
        "command": service["command"],
        "env": [{"name": key, "value": value} for key, value in service["environment"].items()],
        "securityContext": {"readOnlyRootFilesystem": service["read_only"]},
        "volumeMounts": mounts,
    }
    if "healthcheck" in service:
        kind, text = service["healthcheck"]["test"]
        assert kind == "CMD-SHELL"
        container["health"] = {"exec": {"command": ["sh", "-c", text.replace("$$", "$")]}}
    user = {"runAsUser": USER, "runAsGroup": USER, "fsGroup": USER}
    return {
        "spec": {
            "automountServiceAccountToken": False,
            "securityContext": user,
            "volumes": volumes,
            "containers": [container],
        }
    }


class Composed:
    """The services of the example's compose file, each on a host of its own that the others reach by its names."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._folder = folder
        self._services = self._deploy()
        hosts = {name: f"c{number}" for number, name in enumerate(self._services)}
        self._network = stack.enter_context(Network(tuple(hosts.values())))
        self.hosts = {name: self._network.hosts[host] for name, host in hosts.items()}
        addresses = {
            alias: self.hosts[name].address
            for name, service in self._services.items()
            for alias in (name, *service.get("networks", {}).get("default", {}).get("aliases", ()))
        }
        (folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in addresses.items()))
        with (folder / "hosts").open("a") as file:
            file.write("127.0.0.1 localhost\n")
        kafka = spawn(self._on_kafkas_host(self._kafka()), folder / "kafka.log", die_with_parent=True)
        stack.callback(kafka.wait, 30)
        stack.callback(kafka.kill)
        memory = Path("/dev/shm") / f"{folder.name}-{os.getpid()}"
        memory.mkdir()
        memory.chmod(0o1777)
        stack.callback(shutil.rmtree, memory, ignore_errors=True)
        (folder / "services").mkdir()
        claims = {"laminar": self._volume(), "secrets": self._secrets()}
        self._cluster = Cluster(
            self._network,
            folder / "services",
            config_maps={"config": self._config()},
            secrets={},
            claims=claims,
            nodes={MACHINE: memory},
            names=addresses,
        )
        self.containers: dict[str, Container] = {}
        for name, service in self._services.items():
            if name != "kafka":
                pod = Pod(self._cluster, name, as_pod(name, service), 0, MACHINE, self.hosts[name])
                (self.containers[name],) = pod.containers
        stack.callback(lambda: [each.kill() for each in self.containers.values()])

    def start(self) -> None:
        """Start all containers, as `docker compose up` does: once Kafka responds."""

        def responds() -> bool:
            with socket.socket() as probe:
                probe.settimeout(1.0)
                return probe.connect_ex((self.hosts["kafka"].address, 9092)) == 0

        deadline = time.monotonic() + START_S
        while not within(self.hosts["kafka"], responds):
            assert time.monotonic() < deadline, (self._folder / "kafka.log").read_text()[-3000:]
            time.sleep(0.5)
        for each in self.containers.values():
            each.start()

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; a container that fails meanwhile is started again (`restart: on-failure`)."""
        deadline = time.monotonic() + START_S
        while not condition():
            for name, each in self.containers.items():
                if not each.running:
                    assert each.wait(30) != 0, f"{name} has ended:\n{each.log.read_text()[-3000:]}"
                    for file in (self._folder / "services" / f"{name}.tmp").iterdir():
                        shutil.rmtree(file) if file.is_dir() else file.unlink()  # what is in a tmpfs ends with it
                    each.start()
            logs = "\n".join(f"{name}: {each.log.read_text()[-500:]}" for name, each in self.containers.items())
            assert time.monotonic() < deadline, logs
            time.sleep(0.5)

    def exported(self, name: str) -> list[float]:
        """The values of a metric that the service `metrics` exports; none before the first."""

        def read() -> str:
            with urlopen(f"http://{self.hosts['metrics'].address}:{METRICS_PORT}/metrics", timeout=30) as reply:
                text: str = reply.read().decode()
                return text

        try:
            return [
                float(value) for value in re.findall(rf"^{name}{{.*}} (\S+)$", within(self.hosts["kafka"], read), re.M)
            ]
        except OSError:
            return []

    def grace_s(self, name: str) -> float:
        """How long a container may take to end."""
        return float(self._services[name].get("stop_grace_period", "10s").removesuffix("s"))

    def laminar(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `laminar` on Kafka's host."""
        command = [str(Path(sys.executable).parent / "laminar"), *words, "-b", "kafka:9092", "--run", self.run]
        return subprocess.run(
            self._on_kafkas_host(command), capture_output=True, text=True, cwd=self._folder, timeout=200, check=False
        )

    def _on_kafkas_host(self, command: list[str]) -> list[str]:
        """`command` on Kafka's host, where the names of the services are known."""
        script = f"mount --bind {self._folder}/hosts /etc/hosts && exec {shlex.join(command)}"
        words = ("unshare", "--mount", "--propagation", "private", "sh", "-c", script)
        return self._network.command(self.hosts["kafka"].name, *words)

    def _deploy(self) -> dict[str, Any]:
        plan = plan_of(write_example(self._folder, SETTINGS))
        self.run = plan.run
        files = files_of(plan)
        self._config_text = files["run.toml"]
        services: dict[str, Any] = yaml.safe_load(files["compose.yaml"])["services"]
        return services

    def _kafka(self) -> list[str]:
        """The command of a broker with the settings of the service `kafka`: a property for each variable KAFKA_…"""
        given, data = self._services["kafka"]["environment"], self._folder / "kafka"
        settings = {
            name.removeprefix("KAFKA_").lower().replace("_", "."): value
            for name, value in given.items()
            if name.startswith("KAFKA_")
        }
        assert [f"kafka:{settings['log.dirs']}"] == self._services["kafka"]["volumes"]
        settings |= {"log.dirs": str(data), "log.cleaner.dedupe.buffer.size": str(8 << 20)}  # for a small heap
        file = self._folder / "server.properties"
        file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        format_storage(data, settings["node.id"], given["CLUSTER_ID"])
        return java_command(192, JARS.class_path(lambda _: None), "kafka.Kafka", str(file))

    def _config(self) -> Path:
        folder = self._folder / "config"
        folder.mkdir()
        folder.chmod(0o755)
        (folder / "run.toml").write_text(self._config_text)
        (folder / "run.toml").chmod(0o644)
        return folder

    def _secrets(self) -> Path:
        """As docs/deploy.md says: the files of relays, owned by the user of the image."""
        write_relay_files(self._folder / "secrets")
        return given_to(USER, self._folder / "secrets")

    def _volume(self) -> Path:
        make_model(self._folder / "volume" / "model", layers=1)
        return given_to(USER, self._folder / "volume")


@pytest.fixture
def composed(tmp_path: Path) -> Iterator[Composed]:
    with skipped_without_network(), ExitStack() as stack:
        yield Composed(stack, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_composed_example_runs_to_a_passed_audit(composed: Composed) -> None:
    composed.start()
    roles = {name: each for name, each in composed.containers.items() if name != "metrics"}
    composed.until(lambda: all(each.passes("health") for each in roles.values()))
    composed.until(lambda: max(composed.exported("laminar_optimizer_step"), default=0) > STEPS)
    starts = {name: each.starts for name, each in roles.items()}
    roles["rollout-1"].kill()
    composed.until(lambda: roles["rollout-1"].starts > starts["rollout-1"] and roles["rollout-1"].passes("health"))
    steps = max(composed.exported("laminar_optimizer_step"), default=0)
    composed.until(lambda: max(composed.exported("laminar_optimizer_step"), default=0) > steps + 1)
    composed.until(lambda: composed.exported("laminar_audit_passed") == [1.0])
    assert {name: each.starts - starts[name] for name, each in roles.items()} == {
        name: int(name == "rollout-1") for name in roles
    }
    for each in composed.containers.values():
        each.send(SIGTERM)
    for name, each in composed.containers.items():
        code = each.wait(max(30.0, composed.grace_s(name)))
        assert code == (128 + SIGTERM if name == "metrics" else 0), f"{name}:\n{each.log.read_text()[-3000:]}"
    audit = composed.laminar("runs", "audit")
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert json.loads(composed.laminar("topics", "dlq", "list", "--json").stdout) == []
