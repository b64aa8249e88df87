"""Custom resources for operators that a cluster may have: Prometheus, Strimzi for Kafka, and Flink's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from infra.deploy.kubernetes.names import FLINK_OF, FLINK_REST_PORT, labels_of, manifest
from infra.deploy.kubernetes.pods import submitter_pod, worker_pool_pod
from infra.deploy.kubernetes.workloads import SINGLE, disruption_budget
from infra.deploy.plan import DATA_PLANE, DeploymentPlan
from infra.kafka.acls import Acl
from infra.runners.flink_jars import FLINK

_RESOURCES = {"topic": "topic", "group": "group", "transactional-id": "transactionalId", "cluster": "cluster"}


def monitoring(plan: DeploymentPlan) -> Iterator[dict[str, Any]]:
    """The ServiceMonitor of the run's metrics."""
    if plan.deploy.prometheus:
        spec = {
            "selector": {"matchLabels": labels_of(plan, "metrics")},
            "endpoints": [{"port": "metrics", "interval": "15s"}],
        }
        yield manifest(
            plan, "monitoring.coreos.com/v1", "ServiceMonitor", plan.resource_name("metrics"), "metrics", spec=spec
        )


def strimzi(plan: DeploymentPlan) -> Iterator[dict[str, Any]]:
    """A KafkaTopic for each topic; with authentication a KafkaUser for each user, with its ACLs.

    The users' names have that of the run: a KafkaUser has all rights of its user, so runs cannot share one.
    """
    cluster = plan.deploy.strimzi_cluster
    if not cluster:
        return
    for topic in plan.topics:
        spec: dict[str, Any] = {"topicName": topic.name, "partitions": topic.partitions, "config": dict(topic.config)}
        if topic.replication_factor > 0:
            spec["replicas"] = topic.replication_factor
        name = topic.name.lower().replace("_", "-")
        yield _of_cluster(cluster, manifest(plan, "kafka.strimzi.io/v1", "KafkaTopic", name, spec=spec))
    users: dict[str, list[Acl]] = defaultdict(list)
    for acl in plan.acls if plan.authenticated else ():
        users[acl.user].append(acl)
    for user, acls in users.items():
        spec = {
            "authentication": {"type": "scram-sha-512"},
            "authorization": {"type": "simple", "acls": [_rule(acl) for acl in acls]},
        }
        yield _of_cluster(
            cluster, manifest(plan, "kafka.strimzi.io/v1", "KafkaUser", plan.resource_name(user), spec=spec)
        )


CANCELLATION_S = 300
"""Seconds after which Flink ends a task manager whose cancelled task has not ended. A last commit may take 240 s while
Kafka is away (`operators/io/sink.py`)."""


def flink(plan: DeploymentPlan) -> Iterator[dict[str, Any]]:
    """A session cluster of Flink, and the Deployment that submits the data plane to it.

    A worker pool listens on loopback, in the pod of a task manager.

    In the mode `standalone` the task managers exist before a job: its capacity is checked before it is submitted.
    """
    if not plan.deploy.flink_slots:
        return
    spec: dict[str, Any] = {
        "image": plan.deploy.flink_image,
        "flinkVersion": f"v{FLINK.replace('.', '_')}",
        "mode": "standalone",
        "serviceAccount": "flink",
        "podTemplate": {"metadata": {"labels": {FLINK_OF: plan.run}}},
        "flinkConfiguration": {
            "taskmanager.numberOfTaskSlots": "1",
            # Beam's classes come with the job. If an image has them, too, only this order loads them once.
            "classloader.resolve-order": "parent-first",
            "task.cancellation.timeout": str(1000 * CANCELLATION_S),
        },
        "jobManager": {"replicas": 1, "resource": {"cpu": 1, "memory": "1536m"}},
        "taskManager": {
            "replicas": plan.deploy.flink_slots,
            "resource": {"cpu": 1, "memory": "1728m"},
            "podTemplate": worker_pool_pod(plan),
        },
    }
    name = plan.resource_name("flink")
    yield manifest(plan, "flink.apache.org/v1beta1", "FlinkDeployment", name, spec=spec)
    if plan.deploy.flink_slots > 1:
        yield disruption_budget(plan, "pool")
    pod = submitter_pod(plan, f"{name}-rest:{FLINK_REST_PORT}")
    spec = {**SINGLE, "selector": {"matchLabels": labels_of(plan, DATA_PLANE)}, "template": pod}
    yield manifest(plan, "apps/v1", "Deployment", plan.resource_name(DATA_PLANE), DATA_PLANE, spec=spec)


def _of_cluster(cluster: str, made: dict[str, Any]) -> dict[str, Any]:
    made["metadata"]["labels"]["strimzi.io/cluster"] = cluster
    return made


def _rule(acl: Acl) -> dict[str, Any]:
    resource = {"type": _RESOURCES[acl.resource]}
    if acl.resource != "cluster":  # there is only one
        resource |= {"name": acl.name, "patternType": "prefix" if acl.prefixed else "literal"}
    return {"resource": resource, "operations": list(acl.operations), "type": "allow", "host": "*"}
