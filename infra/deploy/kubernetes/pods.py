"""The pods of roles: containers with probes, mounts, limits and as few rights as possible."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from infra.deploy.kubernetes.names import SUBMITS_TO, WEIGHTS, labels_of
from infra.deploy.kubernetes.secrets import secrets_of
from infra.deploy.plan import (
    AGENTS,
    ALIVE,
    CONFIG,
    DATA_PLANE,
    GATEWAY,
    SECRETS,
    SILENT_MIN,
    DeploymentPlan,
    Unit,
    VolumeUse,
)
from infra.deploy.role_acls import EXPORT
from infra.machine import GATEWAY_URL
from infra.machine import VARIABLE as MACHINE
from infra.runners.flink_jars import HEAP_MB
from infra.runners.flink_jobs import CANCEL_S

POOL_PORT = 50000
"""The port of a worker pool, on loopback."""
USER = 10001
"""The user id of the image; no container runs as root."""
LOADER = "loader"
_PROBE_S = 10
_ALIVE_S = 30
_PROBE_TIMEOUT_S = 10
"""A probe starts processes, which takes seconds on a node whose processors are all busy; Kubernetes' default is 1 s."""
_POOL_START_S = 300
_BESIDE_HEAP_MB = 2500
"""Of a pod that submits to Flink, beside the heap of the job server: Java's classes, threads and direct buffers (up to
as much as the heap), and Python with all pipelines (220 MB after their imports) and their graphs."""
_NODE = {"fieldRef": {"fieldPath": "spec.nodeName"}}
_INDEX = {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}


def role_pod(plan: DeploymentPlan, unit: Unit) -> dict[str, Any]:
    """The pod template of `unit`."""
    variable = {"single": "", "indexed": "$(POD_INDEX)", "machine": f"$({MACHINE})"}[unit.placement]
    container = {
        "name": unit.name,
        "image": plan.deploy.image,
        "command": unit.command(variable),
        "env": list(_environment(plan, unit)),
        **({"ports": [{"name": unit.name, "containerPort": unit.port}]} if unit.port else {}),
        "resources": _resources(plan, unit),
        **_probes(plan, unit),
        "securityContext": _container_rights(),
        "volumeMounts": _mounts(plan, unit),
    }
    spec: dict[str, Any] = {"containers": [container], "volumes": _volumes(plan, unit)}
    if unit.weights:
        spec |= _machines(plan, unit)
    if unit.scales:
        spec |= {"serviceAccountName": plan.resource_name(unit.name), "automountServiceAccountToken": True}
    spec["terminationGracePeriodSeconds"] = unit.grace_s
    return template(plan, unit.name, spec, weights=unit.weights)


def template(plan: DeploymentPlan, role: str, spec: dict[str, Any], *, weights: bool = False) -> dict[str, Any]:
    """A pod template with the project's rights; `spec` has containers and volumes."""
    labels = labels_of(plan, role) | ({WEIGHTS: "true"} if weights else {})
    pull = [{"name": plan.deploy.image_pull_secret}] if plan.deploy.image_pull_secret else []
    rights = {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    whole = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": Unit(role).grace_s,
        "securityContext": rights,
        **({"imagePullSecrets": pull} if pull else {}),
        **spec,
    }
    return {"metadata": {"labels": labels}, "spec": whole}


def command_pod(
    plan: DeploymentPlan, name: str, command: Sequence[str], *users: str, volume: VolumeUse = "none"
) -> dict[str, Any]:
    """The pod of a command that connects to Kafka as each of `users`; `volume` is its use of the run's volume."""
    unit = Unit(name, volume=volume)
    container = {
        "name": name,
        "image": plan.deploy.image,
        "command": list(command),
        "env": [{"name": "HOME", "value": "/tmp"}],
        "resources": _resources(plan, unit),
        "securityContext": _container_rights(),
        "volumeMounts": _mounts(plan, unit),
    }
    return template(plan, name, {"containers": [container], "volumes": _volumes(plan, unit, users)})


def worker_pool_pod(plan: DeploymentPlan) -> dict[str, Any]:
    """The pod of a task manager of Flink, `flink-main-container`, with a worker pool for the data plane.

    Its slot may have a shard of each role, so the pool has the resources of all.
    """
    units = [unit for unit in plan.units if unit.name in plan.data_plane]
    pod = _data_plane_pod(plan, "pool", ["python", "-m", "infra.runners.worker_pool", str(POOL_PORT)])
    (pool,), rights = pod["spec"]["containers"], pod["spec"]["securityContext"]
    whole = Unit("pool", cpus=sum(unit.cpus for unit in units), memory_gib=sum(unit.memory_gib for unit in units))
    pool["resources"] = _resources(plan, whole)
    pool |= _pool_probes()
    main = {"name": "flink-main-container", "securityContext": {"allowPrivilegeEscalation": False}}
    # Flink's image has a user of its own; only the pool has ours.
    pool["securityContext"] |= {key: rights.pop(key) for key in ("runAsUser", "runAsGroup", "runAsNonRoot")}
    pod["spec"]["containers"] = [main, pool]
    return {"apiVersion": "v1", "kind": "Pod", **pod}


def submitter_pod(plan: DeploymentPlan, master: str) -> dict[str, Any]:
    """The pod that submits the data plane to the Flink at `master`; it ends when the job is lost."""
    where = [f"--flink_master={master}", "--environment_type=EXTERNAL", f"--environment_config=localhost:{POOL_PORT}"]
    # The default is the largest number of shards: further slots would stay idle, and roles would share workers.
    options = [*where, f"--parallelism={plan.deploy.flink_slots}"]
    command = ["laminar", "submit", DATA_PLANE, CONFIG, "--runner", "flink", "--", *options]
    pod = _data_plane_pod(plan, DATA_PLANE, command)
    pod["metadata"]["labels"][SUBMITS_TO] = plan.run
    unit = Unit(DATA_PLANE, memory_gib=math.ceil((HEAP_MB + _BESIDE_HEAP_MB) / 1024))
    container = pod["spec"]["containers"][0]
    container["env"].insert(0, _alive_file(unit))
    container["resources"] = _resources(plan, unit)
    container |= _probes(plan, unit)
    # A stop cancels the job, and waits until it has ended.
    pod["spec"]["terminationGracePeriodSeconds"] = math.ceil(CANCEL_S) + unit.grace_s
    return pod


def loader_pod(plan: DeploymentPlan) -> dict[str, Any]:
    """A pod with the run's volume, on a machine for weights, that does nothing: `kubectl cp` writes to it."""
    pod = _with_volumes(command_pod(plan, LOADER, ["sleep", "infinity"], volume="write"), "temporary", "volume")
    pod["spec"] |= {**_machines(plan, Unit(LOADER)), "terminationGracePeriodSeconds": 1}
    return pod


def export_pod(plan: DeploymentPlan) -> dict[str, Any]:
    """A pod that writes the experiences of the run so far to its volume."""
    pod = command_pod(plan, EXPORT, plan.export_command(), EXPORT, volume="write")
    pod["spec"]["restartPolicy"] = "OnFailure"
    return _with_volumes(pod, "temporary", "secrets", "volume")


def _with_volumes(pod: dict[str, Any], *names: str) -> dict[str, Any]:
    """`pod` without other volumes: of a pod outside of the kustomization, which names the ConfigMap."""
    spec = pod["spec"]
    for owner, key in ((spec["containers"][0], "volumeMounts"), (spec, "volumes")):
        owner[key] = [each for each in owner[key] if each["name"] in names]
    return pod


def _data_plane_pod(plan: DeploymentPlan, name: str, command: Sequence[str]) -> dict[str, Any]:
    """The pod of a command that does the work of all roles of the data plane."""
    return command_pod(plan, name, command, *plan.data_plane, volume="read")


def _environment(plan: DeploymentPlan, unit: Unit) -> Iterator[dict[str, Any]]:
    yield _alive_file(unit)
    yield {"name": "HOME", "value": "/tmp"}  # libraries write caches; the image is read-only
    if unit.weights:
        yield {"name": MACHINE, "valueFrom": _NODE}
    if unit.placement == "indexed":
        yield {"name": "POD_INDEX", "valueFrom": _INDEX}
    if unit.name in (GATEWAY, AGENTS):
        yield {"name": GATEWAY_URL, "value": plan.gateway_url(plan.resource_name(GATEWAY))}


def _alive_file(unit: Unit) -> dict[str, Any]:
    return {"name": "LAMINAR_ALIVE_FILE", "value": f"{ALIVE}-{unit.name}"}


def _resources(plan: DeploymentPlan, unit: Unit) -> dict[str, Any]:
    limits: dict[str, Any] = {"memory": f"{unit.memory_gib}Gi"}
    if unit.gpus:
        limits[plan.deploy.gpu_resource] = unit.gpus
    return {"requests": {"cpu": f"{unit.cpus:g}", **limits}, "limits": limits}


def _probes(plan: DeploymentPlan, unit: Unit) -> dict[str, Any]:
    """Alive: all processes report. Ready: the steps of all have been restored."""
    folder, _, pattern = f"{ALIVE}-{unit.name}*".rpartition("/")

    def all_of(lines: str) -> dict[str, Any]:
        return _exec(["sh", "-c", f'test "$({lines} | wc -l)" -ge {unit.group}'])

    found = f"find {folder} -maxdepth 1 -name '{pattern}'"
    start = {"periodSeconds": _PROBE_S, "failureThreshold": math.ceil(plan.restore_s / _PROBE_S)}
    ready = all_of(f"""{found} -exec grep -l '"ready": true' {{}} +""")
    return {
        "startupProbe": {**all_of(found), **start},
        "readinessProbe": {**ready, "periodSeconds": _PROBE_S},
        "livenessProbe": {**all_of(f"{found} -mmin -{SILENT_MIN}"), "periodSeconds": _ALIVE_S},
    }


def _pool_probes() -> dict[str, Any]:
    """The pool accepts connections. It listens on loopback, which a kubelet does not reach itself."""
    connect = f"import socket; socket.create_connection(('127.0.0.1', {POOL_PORT}), 5).close()"
    accepts = _exec(["python", "-IS", "-c", connect])
    return {
        "startupProbe": {**accepts, "periodSeconds": _PROBE_S, "failureThreshold": _POOL_START_S // _PROBE_S},
        "readinessProbe": {**accepts, "periodSeconds": _PROBE_S},
        "livenessProbe": {**accepts, "periodSeconds": _ALIVE_S},
    }


def _exec(command: Sequence[str]) -> dict[str, Any]:
    return {"exec": {"command": list(command)}, "timeoutSeconds": _PROBE_TIMEOUT_S}


def _container_rights() -> dict[str, Any]:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _mounts(plan: DeploymentPlan, unit: Unit) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        {"name": "config", "mountPath": CONFIG.rpartition("/")[0], "readOnly": True},
        {"name": "temporary", "mountPath": "/tmp"},
        {"name": "secrets", "mountPath": SECRETS, "readOnly": True},
    ]
    if unit.volume != "none":
        read_only = {"readOnly": True} if unit.volume == "read" else {}
        mounts.append({"name": "volume", "mountPath": plan.deploy.volume_path, **read_only})
    if unit.weights:
        mounts.append({"name": "weights", "mountPath": "/dev/shm"})
    return mounts


def _volumes(plan: DeploymentPlan, unit: Unit, users: Sequence[str] = ()) -> list[dict[str, Any]]:
    secrets = [name for user in users or [unit.name] for name in secrets_of(plan, user, weights=unit.weights)]
    sources = [{"secret": {"name": name}} for name in secrets]
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": plan.name}},
        {"name": "temporary", "emptyDir": {"sizeLimit": "8Gi"}},
        {"name": "secrets", "projected": {"sources": sources, "defaultMode": 0o440}},
    ]
    if unit.volume != "none":
        volumes.append({"name": "volume", "persistentVolumeClaim": {"claimName": plan.name}})
    if unit.weights:
        volumes.append({"name": "weights", "hostPath": {"path": plan.deploy.shared_memory, "type": "Directory"}})
    return volumes


def _machines(plan: DeploymentPlan, unit: Unit) -> dict[str, Any]:
    """The machines for pods with weights: selected by labels, ranks with GPUs on different ones, others spread."""
    found: dict[str, Any] = {}
    if plan.deploy.node_labels:
        found["nodeSelector"] = dict(plan.deploy.node_labels)
    if plan.deploy.tolerations:
        found["tolerations"] = [{"key": key, "operator": "Exists"} for key in plan.deploy.tolerations]
    selector = {"matchLabels": labels_of(plan, unit.name)}
    if unit.name == "rollout" or (unit.count > 1 and not unit.gpus):
        spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
        found["topologySpreadConstraints"] = [{**spread, "labelSelector": selector}]
    elif unit.gpus:
        apart = [{"labelSelector": selector, "topologyKey": "kubernetes.io/hostname"}]
        found["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": apart}}
    return found
