"""The FlinkDeployment of a run, as the operator's CustomResourceDefinition has it; no operator has executed it."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from deployments import BY_COMMAND, deployment, on_flink, run_file

from infra.runners.flink_jars import HEAP_MB
from infra.runners.flink_jobs import CANCEL_S
from operators.io.sink import STUCK_S
from pipelines.config import ConfigError, KafkaConfig
from pipelines.run.deployment import plan_of

VERSIONS = ("1.28", "1.34")


def flink_file(folder: Path, name: str = "secured", more: str = "", actuator: str = BY_COMMAND) -> Path:
    """A file of the configuration `name` on Flink."""
    file = run_file(folder, name)
    file.write_text(on_flink(file.read_text(), more, actuator))
    return file


def manifest_of(documents: list[dict[str, Any]], kind: str, name: str = "laminar-big-run-flink") -> dict[str, Any]:
    (found,) = (each for each in documents if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


def secrets_of(flink: dict[str, Any]) -> set[str]:
    """The Secrets that the worker pool mounts."""
    volumes = {each["name"]: each for each in flink["spec"]["taskManager"]["podTemplate"]["spec"]["volumes"]}
    return {each["secret"]["name"] for each in volumes["secrets"]["projected"]["sources"]}


def test_flink_task_managers_have_a_worker_pool_beside_them(tmp_path: Path) -> None:
    flink = manifest_of(deployment(flink_file(tmp_path, more="memory_gib = { score = 12 }")), "FlinkDeployment")
    spec, managers = flink["spec"], flink["spec"]["taskManager"]
    assert (spec["flinkVersion"], spec["mode"], managers["replicas"]) == ("v1_19", "standalone", 3)
    timeout_s = int(spec["flinkConfiguration"]["task.cancellation.timeout"]) / 1000
    assert STUCK_S + KafkaConfig().transaction_timeout_s < timeout_s < CANCEL_S
    assert all({"cpu", "memory"} == spec[part]["resource"].keys() for part in ("jobManager", "taskManager"))
    template = managers["podTemplate"]
    main, pool = template["spec"]["containers"]
    assert (main["name"], pool["command"][-2:]) == ("flink-main-container", ["infra.runners.worker_pool", "50000"])
    assert {mount["name"] for mount in pool["volumeMounts"]} == {each["name"] for each in template["spec"]["volumes"]}
    roles = ("autoscaler", "prompts", "placement", "score", "experience", "evaluation")
    assert secrets_of(flink) == {f"laminar-big-run-kafka-{role}" for role in roles}
    assert pool["resources"]["requests"] == {"cpu": "6", "memory": f"{5 * 2 + 12}Gi"}
    whole = {**main, "image": "flink"}  # the operator completes its container
    pod = {**template, "metadata": {"name": "task"}, "spec": {**template["spec"], "containers": [whole, pool]}}
    for version in VERSIONS:
        kubernetes_validate.validate(pod, version, strict=True)


def test_worker_pool_is_alive_while_it_accepts_connections(tmp_path: Path) -> None:
    flink = manifest_of(deployment(flink_file(tmp_path)), "FlinkDeployment")
    pool = flink["spec"]["taskManager"]["podTemplate"]["spec"]["containers"][1]
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # so that nobody else gets the port
        port = str(bound.getsockname()[1])
        python, *words = pool["livenessProbe"]["exec"]["command"]
        command = [sys.executable, *(word.replace(pool["command"][-1], port) for word in words)]
        assert (python, port in command[-1]) == ("python", True)
        assert subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode != 0
        bound.listen()
        assert subprocess.run(command, check=False).returncode == 0


def test_submitter_reports_and_has_the_time_of_a_stop(tmp_path: Path) -> None:
    pod = manifest_of(deployment(flink_file(tmp_path)), "Deployment", "laminar-big-run-data-plane")["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    (file,) = (each["value"] for each in container["env"] if each["name"] == "LAMINAR_ALIVE_FILE")
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert f"-name '{Path(file).name}*'" in container[probe]["exec"]["command"][-1]
    assert pod["spec"]["terminationGracePeriodSeconds"] > CANCEL_S + 30


def test_submitter_has_memory_for_its_job_server(tmp_path: Path) -> None:
    pod = manifest_of(deployment(flink_file(tmp_path)), "Deployment", "laminar-big-run-data-plane")["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    resources = container["resources"]
    assert resources["limits"] == {"memory": "4Gi"}
    assert resources["requests"] == {"cpu": "1", "memory": "4Gi"}
    assert 2 * HEAP_MB + 512 < 4 * 1024, "Java's direct buffers may be as large as its heap; and Python"


def test_flink_task_managers_have_the_rights_of_other_pods(tmp_path: Path) -> None:
    flink = manifest_of(deployment(flink_file(tmp_path)), "FlinkDeployment")
    pod = flink["spec"]["taskManager"]["podTemplate"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["imagePullSecrets"] == [{"name": "images"}]
    assert pod["securityContext"].keys() == {"fsGroup", "fsGroupChangePolicy", "seccompProfile"}  # Flink's own user
    rights = pod["containers"][1]["securityContext"]
    assert rights["runAsNonRoot"]
    assert (rights["readOnlyRootFilesystem"], rights["capabilities"]) == (True, {"drop": ["ALL"]})


def test_data_plane_is_one_job_that_a_deployment_submits(tmp_path: Path) -> None:
    """Deployments of its roles would fence the shards of the job."""
    documents = deployment(flink_file(tmp_path))
    workloads = {each["metadata"]["name"] for each in documents if each["kind"] in ("Deployment", "StatefulSet")}
    assert workloads == {f"laminar-big-run-{name}" for name in ("rollout", "trainer", "metrics", "data-plane")}
    flink = manifest_of(documents, "FlinkDeployment")
    submitting = manifest_of(documents, "Deployment", "laminar-big-run-data-plane")
    for version in VERSIONS:
        kubernetes_validate.validate(submitting, version, strict=True)
    spec = submitting["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    pod = spec["template"]
    assert (
        pod["metadata"]["labels"].items()
        >= {"laminar/submits-to": "big-run", **spec["selector"]["matchLabels"]}.items()
    )
    (container,) = pod["spec"]["containers"]
    assert container["command"][-4:] == [
        f"--flink_master={flink['metadata']['name']}-rest:8081",
        "--environment_type=EXTERNAL",
        "--environment_config=localhost:50000",
        f"--parallelism={flink['spec']['taskManager']['replicas']}",
    ]
    pool = flink["spec"]["taskManager"]["podTemplate"]["spec"]
    assert pod["spec"]["volumes"] == pool["volumes"]
    assert container["volumeMounts"] == pool["containers"][1]["volumeMounts"]
    policy = manifest_of(documents, "NetworkPolicy", "laminar-big-run-flink-submits")["spec"]
    assert policy["podSelector"]["matchLabels"] == {"laminar/submits-to": "big-run"}
    assert policy["egress"] == [
        {
            "to": [{"podSelector": {"matchLabels": flink["spec"]["podTemplate"]["metadata"]["labels"]}}],
            "ports": [{"protocol": "TCP", "port": 8081}],
        }
    ]


def test_network_policy_lets_flinks_pods_connect(tmp_path: Path) -> None:
    documents = deployment(flink_file(tmp_path))
    spec = manifest_of(documents, "FlinkDeployment")["spec"]
    policy = manifest_of(documents, "NetworkPolicy")
    for version in VERSIONS:
        kubernetes_validate.validate(policy, version, strict=True)
    rules = policy["spec"]
    pool = spec["taskManager"]["podTemplate"]["metadata"]["labels"]
    assert rules["podSelector"]["matchLabels"].items() <= pool.items()
    peers = [{"podSelector": {"matchLabels": spec["podTemplate"]["metadata"]["labels"]}}]  # of job and task managers
    assert (rules["ingress"], rules["egress"]) == ([{"from": peers}], [{"to": peers}])


@pytest.mark.parametrize("namespace", ["", "operators"])
def test_only_operator_and_submitters_reach_flinks_rest(tmp_path: Path, namespace: str) -> None:
    """Whoever reaches it can run code beside the Secrets of all roles, as Flink has no authentication."""
    documents = deployment(flink_file(tmp_path, more=f'flink_operator_namespace = "{namespace}"'))
    labels = manifest_of(documents, "FlinkDeployment")["spec"]["podTemplate"]["metadata"]["labels"]  # of all its pods
    policies = [each for each in documents if each["kind"] == "NetworkPolicy"]
    selecting = [each for each in policies if each["spec"]["podSelector"]["matchLabels"].items() <= labels.items()]
    assert [each["metadata"]["name"] for each in selecting] == ["laminar-big-run-flink-jobs"]
    for version in VERSIONS:
        kubernetes_validate.validate(selecting[0], version, strict=True)
    rules = selecting[0]["spec"]
    own, rest = rules["ingress"]
    assert rules["policyTypes"] == ["Ingress"]
    assert own == {"from": [{"podSelector": {"matchLabels": labels}}]}
    assert rest["ports"] == [{"protocol": "TCP", "port": 8081}]
    operator, submitting = rest["from"]
    pods = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "flink-kubernetes-operator"}}}
    elsewhere = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}} if namespace else {}
    assert operator == {**pods, **elsewhere}
    assert submitting == {"podSelector": {"matchLabels": {"laminar/submits-to": "big-run"}}}


def test_flink_of_an_emulated_run_mounts_secrets_that_exist(tmp_path: Path) -> None:
    file = flink_file(tmp_path, "emulated")
    users = 'client_properties = "/etc/laminar-secrets/{role}.properties"'
    file.write_text(file.read_text().replace("[kafka]", f"[kafka]\n{users}"))
    flink = manifest_of(deployment(file), "FlinkDeployment", "laminar-emulated-flink")
    roles = ("prompts", "placement", "score", "experience")
    assert secrets_of(flink) == {f"laminar-emulated-kafka-{role}" for role in roles}


def test_flink_that_cannot_run_the_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"flink_slots is 3, but .*score.shards.* need 4: set 4"):
        plan_of(flink_file(tmp_path), ("score.shards=4", "kafka.partitions=4"))
    with pytest.raises(ConfigError, match=r"actuator is 'kubernetes', but with deploy.flink_slots .*set a command"):
        plan_of(flink_file(tmp_path, actuator='actuator = "kubernetes"'))
