"""A run as Kubernetes manifests, a kustomization, and the commands that create its Secrets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from infra.deploy.kubernetes import network, operators, secrets, workloads
from infra.deploy.plan import DeploymentPlan
from infra.yaml_text import as_yaml

Manifest = dict[str, Any]


def kubernetes_files(plan: DeploymentPlan) -> dict[str, str]:
    """The files of folder `kubernetes`, by name. `kubectl apply -k` creates the resources of all but the Secrets."""
    documents: dict[str, list[Manifest]] = {
        "storage.yaml": list(workloads.storage(plan)),
        "accounts.yaml": list(workloads.accounts(plan)),
        "roles.yaml": list(workloads.roles(plan)),
        "jobs.yaml": list(workloads.jobs(plan)),
        "network.yaml": list(network.resources(plan)),
        "monitoring.yaml": list(operators.monitoring(plan)),
        "strimzi.yaml": list(operators.strimzi(plan)),
        "flink.yaml": list(operators.flink(plan)),
    }
    files = {name: _file(manifests) for name, manifests in documents.items() if manifests}
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(files),
        "configMapGenerator": [
            {"name": plan.name, "namespace": plan.deploy.namespace, "files": ["run.toml"]},
        ],
    }
    texts = {"kustomization.yaml": as_yaml(kustomization), "run.toml": plan.config, **files}
    texts["secrets.sh"] = secrets.script(plan)
    return {f"kubernetes/{name}": text for name, text in texts.items()}


def _file(manifests: Iterable[Manifest]) -> str:
    return "".join(f"---\n{as_yaml(each)}" for each in manifests)
