"""Names, labels and the common head of manifests."""

from __future__ import annotations

from typing import Any

from infra.deploy.plan import DeploymentPlan

RUN, ROLE, WEIGHTS, FLINK_OF = "laminar/run", "laminar/role", "laminar/weights", "laminar/flink-of"
"""Labels: the run, the role, whether a pod maps its machine's weights, and the run of a pod of Flink's."""
SUBMITS_TO = "laminar/submits-to"
"""Label of a pod that submits jobs to the Flink of a run: the run."""
FLINK_REST_PORT = 8081


def labels_of(plan: DeploymentPlan, role: str) -> dict[str, str]:
    """The labels that select the pods of `role`."""
    return {RUN: plan.run, ROLE: role}


def manifest(plan: DeploymentPlan, api: str, kind: str, name: str, role: str = "", **rest: Any) -> dict[str, Any]:
    """A manifest in the run's namespace with the run's labels."""
    labels = {"app.kubernetes.io/name": "laminar", RUN: plan.run, **({ROLE: role} if role else {})}
    head = {"name": name, "namespace": plan.deploy.namespace, "labels": labels}
    return {"apiVersion": api, "kind": kind, "metadata": head, **rest}
