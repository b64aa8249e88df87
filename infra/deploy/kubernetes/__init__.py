"""A run as Kubernetes manifests, a kustomization, and the commands that create its Secrets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from infra.deploy.kubernetes import network, operators, secrets, workloads
from infra.deploy.plan import DeploymentPlan
from infra.yaml_text import as_yaml

Manifest = dict[str, Any]
CUSTOM_NAMES = {
    "nameReference": [
        {
            "kind": "ConfigMap",
            "version": "v1",
            "fieldSpecs": [
                {
                    "kind": "FlinkDeployment",
                    "group": "flink.apache.org",
                    "path": "spec/taskManager/podTemplate/spec/volumes/configMap/name",
                }
            ],
        }
    ]
}
"""Where custom resources name the ConfigMap, whose name kustomize completes by a hash: it knows Kubernetes' own."""
_CUSTOM_NAMES = "custom-names.yaml"


def kubernetes_files(plan: DeploymentPlan) -> dict[str, str]:
    """The files of folder `kubernetes`, by name. `kubectl apply -k` creates all but Secrets, loader and export."""
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
    kustomization: dict[str, Any] = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(files),
        "configMapGenerator": [
            {"name": plan.name, "namespace": plan.deploy.namespace, "files": ["run.toml"]},
        ],
    }
    if plan.deploy.flink_slots:
        kustomization["configurations"] = [_CUSTOM_NAMES]
        files[_CUSTOM_NAMES] = as_yaml(CUSTOM_NAMES)
    files |= {f"{name}.yaml": _file(made) for name, made in workloads.by_hand(plan).items()}
    texts = {"kustomization.yaml": as_yaml(kustomization), "run.toml": plan.cluster_config, **files}
    texts["secrets.sh"] = secrets.script(plan)
    return {f"kubernetes/{name}": text for name, text in texts.items()}


def _file(manifests: Iterable[Manifest]) -> str:
    return "".join(f"---\n{as_yaml(each)}" for each in manifests)
