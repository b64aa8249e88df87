"""All pods of a run with authentication, gateway, agents and autoscaler, executed to a passed audit: each container as
a process with exactly the network, mounts, rights and environment of its manifest, each role as its own Kafka user.
The files on the volume are copied there through the loader's pod, and the Secrets are those of the run's script.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pyarrow.parquet as pq
import pytest
import yaml
from api_server import ApiServer
from deployments import GATEWAY, resources, write_example
from end_to_end.small_runs import SMALL, make_model
from faults.network import Network, within
from faults.without_network import skipped_without_network
from pods import Cluster, Container, Pod, given_to, until_all
from test_executed_jobs import SecureBrokers, created_secrets, kafka_files

from infra.certificates import write_gateway_files, write_relay_files
from infra.deploy.kubernetes.pods import USER
from infra.deploy.plan import METRICS_PORT
from infra.kafka.topic_reader import read_topic
from pipelines.run.deployment import files_of, plan_of
from schemas.records import Experience, Settled, Trajectory, WeightVersion
from schemas.topics import DEAD_LETTERS, EXPERIENCES, RELAY, SETTLED, TRAJECTORIES

KAFKA, NODE, API = "k1", "n1", "api"
START_S, POLL_S = 400.0, 2.0
CHAT_TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
AGENT = """
import json, os, time, urllib.request

time.sleep(1)  # otherwise the run would train all the time that the test waits
task, url = json.loads(os.environ["LAMINAR_TASK"]), os.environ["OPENAI_BASE_URL"] + "/chat/completions"
body = {"model": "laminar", "messages": [{"role": "user", "content": task["text"]}], "max_tokens": 6}
head = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head), timeout=300) as response:
    drawn = json.load(response)["usage"]["completion_tokens"]
with open(os.environ["LAMINAR_REPORT"], "w") as report:
    json.dump({"reward": drawn % 3, "answer": str(drawn)}, report)
"""
SETTINGS: dict[str, Any] = {
    **SMALL,
    "run": {**SMALL["run"], "name": "guarded", "audit_every_s": 5.0},
    "kafka": {
        "bootstrap_servers": f"{KAFKA}:9092",
        "client_properties": "/etc/laminar-secrets/{role}.properties",
        "replication_factor": 1,
    },
    "prompts": {
        "source": "jsonl",
        "path": "/laminar/rows.jsonl",
        "task": "sums",
        "heldout": 4,
        "samples_per_prompt": 4,
        "environment": "agent",
        "max_new_tokens": 100,
    },
    "score": {"rewards": [{"name": "environment"}]},
    "experience": {"global_batch": 8},
    "trainer": {"optimizer_steps": 1000, "checkpoint_every": 1},
    "evaluation": {"every": 1},
    "gateway": GATEWAY,
    "agents": {
        "command": ["python", "/laminar/agent.py"],
        "env": {"SSL_CERT_FILE": "/etc/laminar-secrets/ca.pem"},
        "transcripts": False,
        "concurrency": 4,
    },
    "autoscaling": {
        "policy": "schedule",
        "schedule": [{"at": "00:00", "processes": 2}],
        "actuator": "kubernetes",
        "observe_s": 0.5,
        "stable_s": 1.0,
        "cooldown_s": 5.0,
    },
}


class Guarded:
    """The pods of the run by name, a Kafka with authentication, and the API server of their cluster."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._folder = folder
        self._plan = plan_of(write_example(folder, SETTINGS, rollouts=1))
        self.run = self._plan.run
        files = files_of(self._plan)
        templates = dict(_templates(files))
        hosts = {name: f"p{number}" for number, name in enumerate(templates)}
        self._network = stack.enter_context(Network((KAFKA, API, *hosts.values())))
        users = {acl.user for acl in self._plan.acls}
        self._brokers = SecureBrokers(self._network, folder / "brokers", users, (KAFKA,))
        stack.callback(self._brokers.stop)
        self._brokers.start()
        self.api = ApiServer(self._network.hosts[API], folder / "account")
        stack.enter_context(self.api.serving())
        memory = Path("/dev/shm") / f"{folder.name}-{os.getpid()}"
        memory.mkdir()
        memory.chmod(0o1777)
        stack.callback(shutil.rmtree, memory, ignore_errors=True)
        gateway, volume = self._plan.resource_name("gateway"), folder / "volume"
        volume.mkdir()
        (folder / "pods").mkdir()
        addresses = {name: self._network.hosts[host].address for name, host in hosts.items()}
        self._cluster = Cluster(
            self._network,
            folder / "pods",
            config_maps={self._plan.name: self._config(files)},
            secrets=created_secrets(files["kubernetes/secrets.sh"], self._secret_files(gateway), folder),
            claims={self._plan.name: given_to(USER, volume)},
            nodes={NODE: memory},
            names={KAFKA: self._network.hosts[KAFKA].address, gateway: addresses["gateway-0"]},
            api=self.api.address,
            account=folder / "account",
        )
        self.pods = {
            name: Pod(self._cluster, name, template, int(name[-1]), NODE, self._network.hosts[hosts[name]])
            for name, template in templates.items()
        }
        self.volume = volume
        stack.callback(lambda: [each.kill() for each in self.containers().values()])

    def containers(self) -> dict[str, Container]:
        """The container of each pod, by the pod's name."""
        return {name: container for name, pod in self.pods.items() for container in pod.containers}

    def rows(self, topic: Any, kind: type) -> list[Any]:
        """The records of class `kind` in `topic`."""
        host, name = self._network.hosts[KAFKA], topic.name(self.run)
        rows = within(host, lambda: [row for each in read_topic(self._brokers.client, name) for row in each.rows])
        return [row for row in rows if isinstance(row, kind)]

    def load(self, loader: Container) -> None:
        """Copy model, rows and the agents' program to the volume as `kubectl cp` does: by tar in the loader's pod."""
        source = self._folder / "source"
        (make_model(source / "model", layers=1) / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        (source / "agent.py").write_text(AGENT)
        rows = ({"question": f"{number} + 1", "answer": str(number + 1)} for number in range(400))
        (source / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for each in sorted(source.iterdir()):
                archive.add(each, each.name)
        loader.execute(["tar", "-xmf", "-", "-C", "/laminar"], packed.getvalue())

    def exported(self, metric: str) -> float | None:
        """The value of a metric that the exporter's pod serves to other machines; None before the first."""
        address = self.pods["metrics-0"].host.address

        def read() -> str:
            with urlopen(f"http://{address}:{METRICS_PORT}/metrics", timeout=30) as reply:
                text: str = reply.read().decode()
                return text

        try:
            found = re.search(rf"^{metric}{{.*}} (\S+)$", within(self._network.hosts[KAFKA], read), re.MULTILINE)
        except OSError:
            return None
        return None if found is None else float(found[1])

    def audit(self) -> subprocess.CompletedProcess[str]:
        """Run `laminar runs audit` on Kafka's machine, as the user for people."""
        laminar, properties = (
            Path(sys.executable).parent / "laminar",
            self._brokers.security().properties_file("people"),
        )
        words = (str(laminar), "runs", "audit", "--run", self.run, "-F", str(properties))
        command = self._network.command(KAFKA, *words, "-b", f"{self._network.hosts[KAFKA].address}:9092")
        return subprocess.run(command, capture_output=True, text=True, cwd=self._folder, timeout=200, check=False)

    def _config(self, files: dict[str, str]) -> Path:
        folder = self._folder / "config"
        folder.mkdir(mode=0o755)
        (folder / "run.toml").write_text(files["kubernetes/run.toml"])
        return folder

    def _secret_files(self, gateway: str) -> Path:
        files = self._folder / "files"
        write_relay_files(files)
        write_gateway_files(files, [gateway])
        kafka_files(self._brokers.security(), files)
        return files


def _templates(files: dict[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name, by its role and index, and the template of each pod."""
    documents = [
        *resources(files),
        *(yaml.safe_load(files[f"kubernetes/{name}.yaml"]) for name in ("loader", "export")),
    ]
    for each in documents:
        role = each["metadata"]["labels"].get("laminar/role", "")
        if each["kind"] == "Pod":
            yield f"{role}-0", each
        elif "template" in each.get("spec", {}):
            for index in range(each["spec"].get("replicas", 1)):
                yield f"{role}-{index}", each["spec"]["template"]


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    with skipped_without_network(), ExitStack() as stack:
        yield Guarded(stack, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_guarded_pods_run_to_a_passed_audit(guarded: Guarded) -> None:
    pods = guarded.containers()
    loader, acls, topics, metrics, export = (
        pods.pop(f"{name}-0") for name in ("loader", "acls", "topics", "metrics", "export")
    )
    assert {"gateway-0", "agents-0", "autoscaler-0", "relay-0", "evaluation-0"} < pods.keys()
    loader.start()
    _until(lambda: loader.process().name() == "sleep", [loader])
    guarded.load(loader)
    loader.evict(1.0)
    for job in (acls, topics):
        job.start()
        assert job.wait(START_S) == 0, job.log.read_text()[-3000:]

    running = [*pods.values(), metrics]
    for each in running:
        each.start()
    until_all(pods.values(), "readinessProbe", START_S)
    _until(lambda: bool(guarded.api.scales), running)
    path = f"/apis/apps/v1/namespaces/laminar/statefulsets/laminar-{guarded.run}-rollout/scale"
    assert guarded.api.scales[0] == (path, 2)
    _until(lambda: len(guarded.rows(RELAY, WeightVersion)) > 2, running)
    _until(lambda: any(each.outcome == "evaluated" for each in guarded.rows(SETTLED, Settled)), running)
    _until(lambda: guarded.exported("laminar_audit_passed") == 1.0, running)

    for each in running:
        each.send(signal.SIGTERM)
    assert metrics.wait(90) == 128 + signal.SIGTERM
    for each in pods.values():
        assert each.wait(90) == 0, f"{each.name}:\n{each.log.read_text()[-3000:]}"
    assert guarded.rows(DEAD_LETTERS, object) == []
    assert all(row.error is None for row in guarded.rows(TRAJECTORIES, Trajectory))
    audit = guarded.audit()
    assert audit.returncode == 0, audit.stdout + audit.stderr
    export.start()
    assert export.wait(START_S) == 0, export.log.read_text()[-3000:]
    written = pq.read_table(guarded.volume / "exports" / guarded.run / "experiences" / "data")
    assert written.num_rows == len(guarded.rows(EXPERIENCES, Experience))


def _until(condition: Callable[[], bool], running: list[Container]) -> None:
    """Wait until `condition` holds, while all containers run."""
    deadline = time.monotonic() + START_S
    while not condition():
        for each in running:
            assert each.running, f"{each.name} has ended:\n{each.log.read_text()[-3000:]}"
        assert time.monotonic() < deadline
        time.sleep(POLL_S)
