"""Manifests that only some runs have: budgets for disruptions, the storage class of the claim, the Job for ACLs."""

from __future__ import annotations

from pathlib import Path

import kubernetes_validate
import pytest
from deployments import CONFIG_TEXTS, deployment, pod_labels, resources, run_file

from pipelines.run.deployment import files_of, plan_of


@pytest.mark.parametrize("change", ["", "rollout.processes=1"])
@pytest.mark.parametrize("name", CONFIG_TEXTS)
def test_workloads_of_several_pods_have_a_budget(name: str, change: str, tmp_path: Path) -> None:
    """Also those to which an autoscaler may give several."""
    file = run_file(tmp_path, name)
    documents = resources(files_of(plan_of(file, (change,) if change else ())))
    budgets = [each["spec"] for each in documents if each["kind"] == "PodDisruptionBudget"]
    assert all(each["maxUnavailable"] == 1 for each in budgets)
    scaled = {target for each in documents for rule in each.get("rules", ()) for target in rule["resourceNames"]}
    several = []
    for document in documents:
        spec = document.get("spec", {})
        if spec.get("taskManager", spec).get("replicas", 1) > 1 or document["metadata"]["name"] in scaled:
            several += pod_labels(document)[-1:]
    for labels in several:
        assert sum(each["selector"]["matchLabels"].items() <= labels.items() for each in budgets) == 1, labels
    assert len(budgets) == len(several)


def test_claim_has_the_storage_class_that_is_set(tmp_path: Path) -> None:
    file = run_file(tmp_path, "example")
    for change, wanted in (((), None), (("deploy.storage_class='fast'",), "fast")):
        (claim,) = (
            each for each in resources(files_of(plan_of(file, change))) if "accessModes" in each.get("spec", {})
        )
        kubernetes_validate.validate(claim, "1.34", strict=True)
        assert claim["spec"].get("storageClassName") == wanted


def test_job_creates_acls_unless_strimzi_does(tmp_path: Path) -> None:
    for name, wanted in (("authenticated", {"acls", "topics"}), ("secured", {"topics"}), ("example", {"topics"})):
        documents = deployment(run_file(tmp_path, name))
        commands = {
            each["metadata"]["labels"]["laminar/role"]: each["spec"]["template"]["spec"]["containers"][0]["command"]
            for each in documents
            if each["kind"] == "Job"
        }
        assert commands.keys() == wanted
        if acls := commands.get("acls"):
            assert acls[:4] == ["laminar", "acls", "deployed", "--apply"]
            assert acls[4:] == ["-b", "k1:9092,k2:9092,k3:9092", "-F", "/etc/laminar-secrets/admin.properties"]
