"""Configurations to deploy: the example, also with a secured Kafka; a run on GPUs with operators, also on Flink."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w
import yaml

from pipelines.run.deployment import EXAMPLE, files_of, plan_of

ROOT = Path(__file__).parents[4]
_SECURED = """
[run]
name = "big-run"
folder = "/volume/runs"
[kafka]
bootstrap_servers = "one:9093,two:9094"
client_properties = "/etc/laminar-secrets/{role}.properties"
[model]
path = "/volume/model"
[rollout]
engine = "vllm"
processes = 4
tensor_parallel = 2
termination_notice_s = 120
[relay]
listen = "0.0.0.0"
port = 7400
token_file = "/etc/laminar-secrets/relay-token"
certificate_file = "/etc/laminar-secrets/relay.pem"
authority_file = "/etc/laminar-secrets/ca.pem"
[trainer]
ranks = 16
rank_0_host = "laminar-big-run-trainer-0.laminar-big-run-trainer"
device = "cuda"
[trainer.learner]
precision = "bfloat16"
[autoscaling]
actuator = "kubernetes"
minimum = 2
[deploy]
volume = "claimed"
volume_path = "/volume"
namespace = "rl"
image = "images.example/laminar:0.3"
image_pull_secret = "images"
node_labels = { "nvidia.com/gpu.present" = "true" }
strimzi_cluster = "kafka"
prometheus = true
"""
_EMULATED = """
[run]
name = "emulated"
folder = "/laminar/runs"
[kafka]
bootstrap_servers = "kafka:9092"
[rollout]
engine = "emulated"
processes = 8
[deploy]
network_policies = false
"""
_THREE_BROKERS = """bootstrap_servers = "k1:9092,k2:9092,k3:9092"
client_properties = "/etc/laminar-secrets/{role}.properties"
"""
GATEWAY = {
    "host": "0.0.0.0",
    "port": 8443,
    "serve_requests": 0,
    "secret_file": "/etc/laminar-secrets/gateway-secret",
    "certificate_file": "/etc/laminar-secrets/gateway.pem",
    "key_file": "/etc/laminar-secrets/gateway.pem",
}
_AGENTS = tomli_w.dumps(
    {
        "gateway": {**GATEWAY, "processes": 2},
        "agents": {
            "command": ["python", "/laminar/agent.py"],
            "env": {"SSL_CERT_FILE": "/etc/laminar-secrets/ca.pem"},
            "transcripts": False,
        },
    }
)
BY_COMMAND = 'actuator = "command"\ncommand = ["/volume/scale"]'


def on_flink(text: str, more: str = "", actuator: str = BY_COMMAND) -> str:
    """The configuration `text` with three slots of Flink, and `more` in [deploy]."""
    text = text.replace("[deploy]", f"[deploy]\nflink_slots = 3\n{more}")
    return text.replace('actuator = "kubernetes"', actuator)


_EXAMPLE = (ROOT / EXAMPLE).read_text()
CONFIG_TEXTS = {
    "example": _EXAMPLE,
    "secured": _SECURED,
    "flink": on_flink(_SECURED),
    "emulated": _EMULATED,
    "authenticated": _EXAMPLE.replace('bootstrap_servers = "kafka:9092"', _THREE_BROKERS),
    "agents": _EXAMPLE.replace("[prompts]", '[prompts]\nenvironment = "agent"') + _AGENTS,
}


def run_file(folder: Path, name: str) -> Path:
    """The configuration `name` as a file."""
    file = folder / "run.toml"
    file.write_text(CONFIG_TEXTS[name])
    return file


def write_example(folder: Path, settings: Mapping[str, Mapping[str, Any]], rollouts: int = 2) -> Path:
    """The example with `settings` by section and so many rollout processes, as a file."""
    table = tomllib.loads(_EXAMPLE)
    for section, values in settings.items():
        table[section] = {**table.get(section, {}), **values}
    table["rollout"]["processes"] = rollouts
    file = folder / "run.toml"
    file.write_text(tomli_w.dumps(table))
    return file


_MADE: dict[str, list[dict[str, Any]]] = {}
"""By the text of a configuration."""


def deployment(file: Path) -> list[dict[str, Any]]:
    """All Kubernetes resources of the configuration in `file`. Tests only read them."""
    text = file.read_text()
    if text not in _MADE:
        _MADE[text] = generated(file)
    return _MADE[text]


def generated(file: Path) -> list[dict[str, Any]]:
    """As `deployment`, generated anew."""
    return resources(files_of(plan_of(file)))


def resources(files: Mapping[str, str]) -> list[dict[str, Any]]:
    """The resources that `kubectl apply -k` creates from deployment files, but for the ConfigMap."""
    names = yaml.safe_load(files["kubernetes/kustomization.yaml"])["resources"]
    return [each for name in names for each in yaml.safe_load_all(files[f"kubernetes/{name}"])]


def pods(documents: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], dict[str, Any]]]:
    """Each workload and the specification of its pods; of a Flink's task managers without Flink's own container."""
    for each in documents:
        spec = each.get("spec", {})
        if each["kind"] == "FlinkDeployment":
            pod = spec["taskManager"]["podTemplate"]["spec"]
            yield each, {**pod, "containers": [own for own in pod["containers"] if "image" in own]}
        elif "template" in spec:
            yield each, spec["template"]["spec"]


def pod_labels(document: Mapping[str, Any]) -> list[dict[str, str]]:
    """The labels of the pods of a workload; of a FlinkDeployment those of all pods, then also of its task managers."""
    spec = document.get("spec", {})
    templates = [spec.get("template"), spec.get("podTemplate"), spec.get("taskManager", {}).get("podTemplate")]
    return [each["metadata"]["labels"] for each in templates if each]
