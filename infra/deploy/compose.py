"""A run as a compose file: Kafka, the roles, and its metrics."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

from infra.deploy.plan import AGENTS, ALIVE, CONFIG, GATEWAY, METRICS_PORT, SECRETS, SILENT_MIN, DeploymentPlan, Unit
from infra.machine import GATEWAY_URL
from infra.machine import VARIABLE as MACHINE
from infra.yaml_text import as_yaml

MACHINE_NAME = "compose"
"""All containers share one machine's memory."""
KAFKA_DATA = "/var/lib/kafka/data"


def compose_file(plan: DeploymentPlan) -> str:
    """The compose file of `plan`; its configuration is run.toml in the same folder.

    Each container has GPUs of its own, in the order of the containers, so `plan` must fit one machine.
    """
    services: dict[str, Any] = {"kafka": _kafka(plan)}
    first = 0
    for unit in plan.units:
        for index in range(unit.count):
            name = f"{unit.name}-{index}" if unit.placement == "indexed" else unit.name
            services[name] = _service(plan, unit, index, range(first, first + unit.gpus))
            first += unit.gpus
    services["metrics"] = _metrics(plan)
    return as_yaml({"name": plan.name, "services": services, "volumes": {"kafka": {}, "laminar": {}}})


_CONFINED: dict[str, Any] = {
    "read_only": True,
    "tmpfs": ["/tmp"],
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
    "depends_on": {"kafka": {"condition": "service_healthy"}},
    "restart": "on-failure",
}


def _service(plan: DeploymentPlan, unit: Unit, index: int, gpus: range) -> dict[str, Any]:
    devices = [{"driver": "nvidia", "device_ids": [*map(str, gpus)], "capabilities": ["gpu"]}]
    mode = {"none": [], "read": [":ro"], "write": [""]}[unit.volume]
    return {
        "image": plan.deploy.image,
        "command": unit.command(str(index)),
        "environment": {
            "LAMINAR_ALIVE_FILE": ALIVE,
            "HOME": "/tmp",
            **({MACHINE: MACHINE_NAME} if unit.weights else {}),
            **({GATEWAY_URL: plan.gateway_url(GATEWAY)} if unit.name in (GATEWAY, AGENTS) else {}),
        },
        "volumes": [
            f"./run.toml:{CONFIG}:ro",
            f"./secrets:{SECRETS}:ro",
            *(f"laminar:{plan.deploy.volume_path}{suffix}" for suffix in mode),
            *([f"{plan.deploy.shared_memory}:/dev/shm"] if unit.weights else []),
        ],
        **_CONFINED,
        **_reached(plan, unit, index),
        "stop_grace_period": f"{unit.grace_s}s",
        "healthcheck": {
            "test": [
                "CMD-SHELL",
                f"test $$(find /tmp -maxdepth 1 -name 'laminar-alive*' -mmin -{SILENT_MIN} | wc -l) -ge {unit.group}",
            ],
            "interval": "30s",
            "start_period": "600s",
        },
        "cpu_shares": _shares(unit.cpus),
        "mem_limit": f"{unit.memory_gib}g",
        **({"deploy": {"resources": {"reservations": {"devices": devices}}}} if gpus else {}),
    }


def _shares(processors: float) -> int:
    """Its part while others want processors, too; a machine may have fewer than all containers request."""
    return max(2, round(1024 * processors))


def _reached(plan: DeploymentPlan, unit: Unit, index: int) -> dict[str, Any]:
    """The other host names of a container: with a port that of its unit, and this machine's port leads to the first."""
    address = "127.0.0.1:" if plan.deploy.gateway_service == "ClusterIP" else ""
    ports = {"ports": [f"{address}{unit.port}:{unit.port}"]} if unit.port and not index else {}
    aliases = [*([unit.name] if unit.port else []), *([unit.first_host] if unit.first_host and not index else [])]
    return {**({"networks": {"default": {"aliases": aliases}}} if aliases else {}), **ports}


def _metrics(plan: DeploymentPlan) -> dict[str, Any]:
    """The exporter of the run's metrics to Prometheus; it is started again until the run's topics exist."""
    return {
        "image": plan.deploy.image,
        "command": plan.metrics_command(),
        "environment": {"HOME": "/tmp"},
        "volumes": [f"./secrets:{SECRETS}:ro"],
        **_CONFINED,
        "ports": [f"127.0.0.1:{METRICS_PORT}:{METRICS_PORT}"],
        "cpu_shares": _shares(1.0),
        "mem_limit": "2g",
    }


def _kafka(plan: DeploymentPlan) -> dict[str, Any]:
    cluster = base64.urlsafe_b64encode(hashlib.sha256(plan.name.encode()).digest()[:16]).decode().rstrip("=")
    return {
        "image": plan.deploy.kafka_image,
        "environment": {
            "CLUSTER_ID": cluster,
            "KAFKA_LOG_DIRS": KAFKA_DATA,
            "KAFKA_NODE_ID": "1",
            "KAFKA_PROCESS_ROLES": "broker,controller",
            "KAFKA_LISTENERS": "PLAINTEXT://:9092,CONTROLLER://:9093",
            "KAFKA_ADVERTISED_LISTENERS": "PLAINTEXT://kafka:9092",
            "KAFKA_CONTROLLER_LISTENER_NAMES": "CONTROLLER",
            "KAFKA_LISTENER_SECURITY_PROTOCOL_MAP": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "KAFKA_CONTROLLER_QUORUM_VOTERS": "1@localhost:9093",
            "KAFKA_OFFSETS_TOPIC_REPLICATION_FACTOR": "1",
            "KAFKA_TRANSACTION_STATE_LOG_REPLICATION_FACTOR": "1",
            "KAFKA_TRANSACTION_STATE_LOG_MIN_ISR": "1",
            "KAFKA_MESSAGE_MAX_BYTES": str(16 * 1024 * 1024),
            "KAFKA_AUTO_CREATE_TOPICS_ENABLE": "false",
            "KAFKA_OFFSETS_RETENTION_MINUTES": str(2**31 - 1),
        },
        "volumes": [f"kafka:{KAFKA_DATA}"],
        "healthcheck": {
            "test": ["CMD-SHELL", "/opt/kafka/bin/kafka-broker-api-versions.sh --bootstrap-server localhost:9092"],
            "interval": "5s",
            "retries": 24,
        },
    }
