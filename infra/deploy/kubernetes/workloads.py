"""The workloads of a run: a Deployment for each single role, a StatefulSet for indexed ones, a DaemonSet of relays.

The DaemonSet is the node agent: one relay a machine owns the machine's weight store, which its rollouts and trainer
ranks map. The index of a process is its pod's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from infra.deploy.kubernetes.names import labels_of, manifest
from infra.deploy.kubernetes.pods import LOADER, command_pod, export_pod, loader_pod, role_pod
from infra.deploy.kubernetes.secrets import ADMIN
from infra.deploy.plan import CONFIG, METRICS_PORT, DeploymentPlan, Unit
from infra.deploy.role_acls import EXPORT, PEOPLE

SINGLE = {"replicas": 1, "revisionHistoryLimit": 3, "strategy": {"type": "Recreate"}}
"""Of a Deployment whose second process would fence, or cancel, the first."""
_KINDS = {"single": "Deployment", "indexed": "StatefulSet", "machine": "DaemonSet"}


def storage(plan: DeploymentPlan) -> Iterator[dict[str, Any]]:
    """The claim of the volume with the model, checkpoints and exports."""
    deploy = plan.deploy
    if deploy.volume == "claimed" or all(unit.volume == "none" for unit in plan.units):
        return
    spec = {
        "accessModes": [deploy.volume_access],
        "resources": {"requests": {"storage": f"{deploy.volume_gib}Gi"}},
        **({"storageClassName": deploy.storage_class} if deploy.storage_class else {}),
    }
    yield manifest(plan, "v1", "PersistentVolumeClaim", plan.name, spec=spec)


def by_hand(plan: DeploymentPlan) -> dict[str, list[dict[str, Any]]]:
    """What a person creates, by name: the pod that copies the model and other files to the volume, before the roles
    exist, and the Job that writes the experiences of the run to it.
    """
    if all(unit.volume == "none" for unit in plan.units):
        return {}
    job = {"backoffLimit": 10, "template": export_pod(plan)}  # its folder has all state: it may run again
    return {
        LOADER: [manifest(plan, "v1", "Pod", plan.resource_name(LOADER), LOADER, spec=loader_pod(plan)["spec"])],
        EXPORT: [manifest(plan, "batch/v1", "Job", plan.resource_name(EXPORT), EXPORT, spec=job)],
    }


def roles(plan: DeploymentPlan) -> Iterator[dict[str, Any]]:
    """The workloads of all roles, and what protects them while machines are drained."""
    scaled = {unit.scales for unit in plan.workloads}
    for unit in plan.workloads:
        yield _workload(plan, unit)
        if unit.count > 1 or unit.name in scaled:
            yield disruption_budget(plan, unit.name)
    yield _metrics(plan)


def disruption_budget(plan: DeploymentPlan, role: str) -> dict[str, Any]:
    """Of the pods of `role`, a drain of machines evicts one at a time."""
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": labels_of(plan, role)}}
    return manifest(plan, "policy/v1", "PodDisruptionBudget", plan.resource_name(role), role, spec=spec)


def accounts(plan: DeploymentPlan) -> Iterator[dict[str, Any]]:
    """The service accounts of units that change the number of pods of others, with that right alone."""
    for unit in plan.workloads:
        if not unit.scales:
            continue
        name = plan.resource_name(unit.name)
        scale = {
            "apiGroups": ["apps"],
            "resources": ["statefulsets/scale"],
            "resourceNames": [plan.resource_name(unit.scales)],
            "verbs": ["patch"],
        }
        subject = {"kind": "ServiceAccount", "name": name, "namespace": plan.deploy.namespace}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
        yield manifest(plan, "v1", "ServiceAccount", name, unit.name, automountServiceAccountToken=False)
        yield manifest(plan, "rbac.authorization.k8s.io/v1", "Role", name, unit.name, rules=[scale])
        yield manifest(
            plan, "rbac.authorization.k8s.io/v1", "RoleBinding", name, unit.name, subjects=[subject], roleRef=role
        )


def jobs(plan: DeploymentPlan) -> Iterator[dict[str, Any]]:
    """Create the topics, and with authentication first the ACLs, which Strimzi does itself. Both may run again."""
    if plan.authenticated and not plan.deploy.strimzi_cluster:
        yield _job(plan, "acls", ["laminar", "acls", plan.run, "--apply", *plan.as_user(ADMIN)])
    yield _job(plan, "topics", ["laminar", "topics", "create", CONFIG])


def _workload(plan: DeploymentPlan, unit: Unit) -> dict[str, Any]:
    name = plan.resource_name(unit.name)
    spec: dict[str, Any] = {
        "selector": {"matchLabels": labels_of(plan, unit.name)},
        "template": role_pod(plan, unit),
    }
    match unit.placement:
        case "single":
            spec = {**SINGLE, **spec}
        case "indexed":
            spec = {"replicas": unit.count, "serviceName": name, "podManagementPolicy": "Parallel", **spec}
            if unit.name == "trainer" and unit.count > 1:
                # All ranks need one configuration, so pods that are replaced one by one would wait for each other.
                spec["updateStrategy"] = {"type": "OnDelete"}
        case "machine":
            spec = {"updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}}, **spec}
    return manifest(plan, "apps/v1", _KINDS[unit.placement], name, unit.name, spec=spec)


def _metrics(plan: DeploymentPlan) -> dict[str, Any]:
    """The exporter of the run's metrics to Prometheus."""
    pod = command_pod(plan, "metrics", plan.metrics_command(), PEOPLE)
    ready = {"httpGet": {"path": "/metrics", "port": METRICS_PORT}, "timeoutSeconds": 5}
    pod["spec"]["containers"][0] |= {
        "ports": [{"name": "metrics", "containerPort": METRICS_PORT}],
        "readinessProbe": ready,
        "livenessProbe": {**ready, "initialDelaySeconds": 60, "periodSeconds": 30, "failureThreshold": 6},
    }
    spec = {"replicas": 1, "selector": {"matchLabels": labels_of(plan, "metrics")}, "template": pod}
    return manifest(plan, "apps/v1", "Deployment", plan.resource_name("metrics"), "metrics", spec=spec)


def _job(plan: DeploymentPlan, name: str, command: list[str]) -> dict[str, Any]:
    pod = command_pod(plan, name, command, ADMIN)
    pod["spec"]["restartPolicy"] = "OnFailure"
    spec = {"backoffLimit": 10, "ttlSecondsAfterFinished": 86400, "template": pod}
    contents = hashlib.sha256(json.dumps([spec, plan.cluster_config], sort_keys=True).encode()).hexdigest()[:8]
    job = plan.resource_name(f"{name}-{contents}")  # a Job cannot be changed: another configuration is another Job
    return manifest(plan, "batch/v1", "Job", job, name, spec=spec)
