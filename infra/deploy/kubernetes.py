"""A run as Kubernetes manifests: a Deployment for each single role, a StatefulSet for each indexed role.

The index of a process is its pod's. Rollouts and trainers have a relay in their pod and share memory with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from infra.deploy.units import ALIVE, CONFIG, SECRETS, SILENT_MIN, DeploymentPlan, Unit
from infra.yaml_text import as_yaml

_INDEX = "$(POD_INDEX)"


def manifests(plan: DeploymentPlan) -> str:
    """The manifests of `plan`, one YAML document each."""
    return "".join(f"---\n{as_yaml(each)}" for each in _documents(plan))


def _documents(plan: DeploymentPlan) -> Iterator[dict[str, Any]]:
    name = f"laminar-{plan.run}"
    yield {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": {"run": plan.run}},
        "data": {"run.toml": plan.config},
    }
    relay = next((unit for unit in plan.units if unit.name == "relay"), None)
    first_relay = 0
    for unit in plan.units:
        if unit.name == "relay":
            continue
        sidecar = relay if unit.place == "weights" else None
        yield _workload(plan, unit, sidecar, first_relay)
        first_relay += unit.count if sidecar else 0
        if unit.indexed:
            yield _service(plan, unit)


def _workload(plan: DeploymentPlan, unit: Unit, relay: Unit | None, first_relay: int) -> dict[str, Any]:
    name = f"laminar-{plan.run}-{unit.name}"
    labels = {"run": plan.run, "role": unit.name}
    containers = [_container(plan, unit, unit.command(_INDEX))]
    if relay is not None:
        command = " ".join(relay.command(f"$((POD_INDEX + {first_relay}))"))
        command += f" --set relay.advertise=${{POD_IP}}:{relay.port}" if relay.port else ""
        containers.append(_container(plan, relay, ["sh", "-c", f"exec {command}"]))
    volumes: list[dict[str, Any]] = [{"name": "config", "configMap": {"name": f"laminar-{plan.run}"}}]
    volumes.append({"name": "memory", "emptyDir": {"medium": "Memory"}})
    volumes.append({"name": "secrets", "secret": {"secretName": f"laminar-{plan.run}", "optional": True}})
    spec: dict[str, Any] = {
        "replicas": unit.count,
        "selector": {"matchLabels": labels},
        "template": {
            "metadata": {"labels": labels},
            "spec": {"terminationGracePeriodSeconds": 60, "containers": containers, "volumes": volumes},
        },
    }
    if unit.indexed:
        spec = {"serviceName": name, "podManagementPolicy": "Parallel", **spec}
    else:
        spec["strategy"] = {"type": "Recreate"}  # a second one would fence the first
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet" if unit.indexed else "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": spec,
    }


def _container(plan: DeploymentPlan, unit: Unit, command: list[str]) -> dict[str, Any]:
    pod_index = {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}
    pod_ip = {"fieldRef": {"fieldPath": "status.podIP"}}
    alive = f"{ALIVE}-{unit.name}"
    requests: dict[str, Any] = {"cpu": str(unit.cpus), "memory": f"{unit.memory_gib}Gi"}
    limits: dict[str, Any] = {"memory": f"{unit.memory_gib}Gi"}
    if unit.gpus:
        limits["nvidia.com/gpu"] = requests["nvidia.com/gpu"] = unit.gpus
    exists = {"exec": {"command": ["test", "-e", alive]}}
    ready = {"exec": {"command": ["grep", "-q", '"ready": true', alive]}}
    fresh = {"exec": {"command": ["sh", "-c", f'test -n "$(find {alive} -mmin -{SILENT_MIN})"']}}
    return {
        "name": unit.name,
        "image": plan.image,
        "command": command,
        "env": [
            {"name": "LAMINAR_ALIVE_FILE", "value": alive},
            *([{"name": "POD_INDEX", "valueFrom": pod_index}] if unit.indexed else []),
            *([{"name": "POD_IP", "valueFrom": pod_ip}] if unit.port else []),
        ],
        "resources": {"requests": requests, "limits": limits},
        "startupProbe": {**exists, "periodSeconds": 5, "failureThreshold": 120},
        "readinessProbe": {**ready, "periodSeconds": 10},
        "livenessProbe": {**fresh, "periodSeconds": 30},
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG.rpartition("/")[0], "readOnly": True},
            {"name": "memory", "mountPath": "/dev/shm"},
            {"name": "secrets", "mountPath": SECRETS, "readOnly": True},
        ],
    }


def _service(plan: DeploymentPlan, unit: Unit) -> dict[str, Any]:
    """The headless service that gives the pods of a StatefulSet their names."""
    name = f"laminar-{plan.run}-{unit.name}"
    labels = {"run": plan.run, "role": unit.name}
    spec = {"clusterIP": "None", "selector": labels}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "labels": labels}, "spec": spec}
