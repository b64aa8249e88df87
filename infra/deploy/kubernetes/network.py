"""Services, and policies by which a pod may be reached only by those that need it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from infra.deploy.kubernetes.names import FLINK_OF, FLINK_REST_PORT, RUN, SUBMITS_TO, WEIGHTS, labels_of, manifest
from infra.deploy.plan import AGENTS, GATEWAY, METRICS_PORT, DeploymentPlan
from infra.kafka.properties import parse_servers

_DNS = [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]


def resources(plan: DeploymentPlan) -> Iterator[dict[str, Any]]:
    """The Services of a run, and its NetworkPolicies if they are wanted."""
    for unit in plan.workloads:
        if unit.port:
            port = {"name": unit.name, "port": unit.port, "targetPort": unit.name}
            spec: dict[str, Any] = {
                "type": plan.deploy.gateway_service,
                "selector": labels_of(plan, unit.name),
                "ports": [port],
            }
            yield manifest(plan, "v1", "Service", plan.resource_name(unit.name), unit.name, spec=spec)
        elif unit.placement == "indexed":  # headless: gives the pods their names
            spec = {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": labels_of(plan, unit.name),
            }
            yield manifest(plan, "v1", "Service", plan.resource_name(unit.name), unit.name, spec=spec)
    port = {"name": "metrics", "port": METRICS_PORT, "targetPort": "metrics"}
    spec = {"selector": labels_of(plan, "metrics"), "ports": [port]}
    yield manifest(plan, "v1", "Service", plan.resource_name("metrics"), "metrics", spec=spec)
    if plan.deploy.network_policies:
        yield from _policies(plan)


def _policies(plan: DeploymentPlan) -> Iterator[dict[str, Any]]:
    """All pods: names and Kafka. Pods with weights: object stores, and each other at any port (KV, collectives)."""
    everyone = {"matchLabels": {RUN: plan.run}}
    extra = plan.deploy.extra_egress_ports
    kafka = _tcp(*(int(each.rpartition(":")[2]) for each in parse_servers(plan.brokers)), *extra)
    egress: list[dict[str, Any]] = [{"ports": _DNS}, {"ports": kafka}]
    rules = {"podSelector": everyone, "policyTypes": ["Ingress", "Egress"], "ingress": [], "egress": egress}
    yield _policy(plan, "all", rules)
    with_weights = {"matchLabels": {RUN: plan.run, WEIGHTS: "true"}}
    storage = {"ports": _tcp(*plan.storage_ports, *extra)}
    peers = [{"podSelector": with_weights}]
    rules = {
        "podSelector": with_weights,
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": peers}],
        "egress": [{"to": peers}, storage],
    }
    yield _policy(plan, "weights", rules)
    for unit in plan.workloads:
        if unit.scales:
            selector = {"matchLabels": labels_of(plan, unit.name)}
            egress = [{"ports": _tcp(443, 6443)}]  # the API server
            yield _policy(plan, unit.name, {"podSelector": selector, "policyTypes": ["Egress"], "egress": egress})
    if plan.gateway_port:
        yield from _gateway_policies(plan)
    if plan.deploy.flink_slots:
        yield from _flink_policies(plan)
    scraped = {"ports": [{"protocol": "TCP", "port": METRICS_PORT}]}
    selector = {"matchLabels": labels_of(plan, "metrics")}
    yield _policy(plan, "metrics", {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": [scraped]})


def _flink_policies(plan: DeploymentPlan) -> Iterator[dict[str, Any]]:
    """Flink has no authentication, and a job runs code beside the roles' Secrets: only its own pods connect to it, the
    operator, and pods that submit.
    """
    pods = {"matchLabels": {FLINK_OF: plan.run}}
    peers = [{"podSelector": pods}]
    rules = {"podSelector": {"matchLabels": labels_of(plan, "pool")}, "policyTypes": ["Ingress", "Egress"]}
    yield _policy(plan, "flink", {**rules, "ingress": [{"from": peers}], "egress": [{"to": peers}]})
    operator: dict[str, Any] = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "flink-kubernetes-operator"}}}
    if namespace := plan.deploy.flink_operator_namespace:
        operator["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    submitter, ports = {"matchLabels": {SUBMITS_TO: plan.run}}, [{"protocol": "TCP", "port": FLINK_REST_PORT}]
    ingress = [{"from": peers}, {"from": [operator, {"podSelector": submitter}], "ports": ports}]
    yield _policy(plan, "flink-jobs", {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": ingress})
    egress = [{"to": peers, "ports": ports}]
    yield _policy(plan, "flink-submits", {"podSelector": submitter, "policyTypes": ["Egress"], "egress": egress})


def _gateway_policies(plan: DeploymentPlan) -> Iterator[dict[str, Any]]:
    """Agents connect to the gateway alone; so may everybody if its Service leads out of the cluster."""
    gateway, agents = ({"matchLabels": labels_of(plan, name)} for name in (GATEWAY, AGENTS))
    ports = [{"protocol": "TCP", "port": plan.gateway_port}]
    inside = {"from": [{"podSelector": agents}]} if plan.deploy.gateway_service == "ClusterIP" else {}
    rules = {"podSelector": gateway, "policyTypes": ["Ingress"], "ingress": [{**inside, "ports": ports}]}
    yield _policy(plan, GATEWAY, rules)
    if any(unit.name == AGENTS for unit in plan.units):
        egress = [{"to": [{"podSelector": gateway}], "ports": ports}]
        yield _policy(plan, AGENTS, {"podSelector": agents, "policyTypes": ["Egress"], "egress": egress})


def _tcp(*ports: int) -> list[dict[str, Any]]:
    return [{"protocol": "TCP", "port": port} for port in sorted(set(ports))]


def _policy(plan: DeploymentPlan, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return manifest(plan, "networking.k8s.io/v1", "NetworkPolicy", plan.resource_name(name), spec=spec)
