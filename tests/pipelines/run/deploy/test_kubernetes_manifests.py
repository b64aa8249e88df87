"""Kubernetes manifests: valid by Kubernetes' schemas, and safe by the rules that linters of manifests check."""

from __future__ import annotations

from pathlib import Path

import kubernetes_validate
import pytest
import typer
import yaml
from deployments import CONFIG_TEXTS, deployment, generated, pod_labels, pods, resources, run_file

from pipelines.cli.export import app
from pipelines.config import ConfigError
from pipelines.run.deployment import files_of, plan_of, units_of
from schemas.topics import CATALOGUE

VERSIONS = ("1.28", "1.34")
CUSTOM = {"ServiceMonitor", "KafkaTopic", "KafkaUser", "FlinkDeployment"}


@pytest.fixture(params=CONFIG_TEXTS)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return run_file(tmp_path, request.param)


def jobs(file: Path) -> set[str]:
    return {each["metadata"]["name"] for each in generated(file) if each["kind"] == "Job"}


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_valid_by_kubernetes_schemas(file: Path, version: str) -> None:
    for document in deployment(file):
        if document["kind"] not in CUSTOM:
            kubernetes_validate.validate(document, version, strict=True)


def test_manifests_have_unique_names_in_one_namespace(file: Path) -> None:
    documents = deployment(file)
    names = [(each["kind"], each["metadata"]["name"]) for each in documents]
    assert len(set(names)) == len(names)
    assert len({each["metadata"]["namespace"] for each in documents}) == 1


def test_containers_have_no_rights_beyond_their_work(file: Path) -> None:
    for workload, pod in pods(deployment(file)):
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        scales = workload["metadata"]["name"].endswith("-autoscaler")
        assert pod["automountServiceAccountToken"] == scales == ("serviceAccountName" in pod)
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        for container in pod["containers"]:
            rights = pod["securityContext"] | container["securityContext"]
            assert rights["runAsNonRoot"], workload["metadata"]["name"]
            assert rights["capabilities"] == {"drop": ["ALL"]}
            assert rights["readOnlyRootFilesystem"]
            assert not rights["allowPrivilegeEscalation"]


def test_containers_have_requests_limits_and_probes(file: Path) -> None:
    for workload, pod in pods(deployment(file)):
        for container in pod["containers"]:
            resources = container["resources"]
            assert {"cpu", "memory"} <= resources["requests"].keys()
            assert resources["limits"]["memory"] == resources["requests"]["memory"]
            if workload["kind"] != "Job":
                assert {"readinessProbe", "livenessProbe"} <= container.keys()
                assert container["readinessProbe"] != container["livenessProbe"]
            for probe in (each for name, each in container.items() if name.endswith("Probe")):
                assert probe["timeoutSeconds"] >= (10 if "exec" in probe else 5), workload["metadata"]["name"]


def test_job_of_a_changed_run_is_another(file: Path) -> None:
    """Kubernetes refuses to change a Job that exists."""
    first, again = jobs(file), jobs(file)
    file.write_text(file.read_text().replace("[run]", "[run]\nwarn_steps = 77"))
    assert first == again
    assert not first & jobs(file)


def test_pods_mount_only_volumes_that_exist(file: Path) -> None:
    documents = deployment(file)
    plan = plan_of(file)
    claims = {each["metadata"]["name"] for each in documents if each["kind"] == "PersistentVolumeClaim"}
    assert claims == (set() if plan.deploy.volume == "claimed" else {plan.name})
    for _, pod in pods(documents):
        volumes = {each["name"]: each for each in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
        if "volume" in volumes:
            assert volumes["volume"]["persistentVolumeClaim"]["claimName"] == plan.name


def test_only_the_trainer_writes_to_the_volume(file: Path) -> None:
    writers = {
        workload["metadata"]["labels"]["laminar/role"]
        for workload, pod in pods(deployment(file))
        for container in pod["containers"]
        for mount in container["volumeMounts"]
        if mount["name"] == "volume" and not mount.get("readOnly")
    }
    assert writers == {"trainer"}


def test_labels_of_services_and_policies_select_pods(file: Path) -> None:
    documents = deployment(file)
    labels = [each for document in documents for each in pod_labels(document)]
    for document in documents:
        spec = document.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector") or {}
        wanted = selector.get("matchLabels", selector)
        if document["kind"] in ("Service", "NetworkPolicy", "PodDisruptionBudget"):
            selects_weights = "laminar/weights" in wanted and plan_of(file).run == "emulated"
            assert selects_weights or any(wanted.items() <= each.items() for each in labels), document["metadata"]


def test_ranks_of_one_machine_share_a_container(tmp_path: Path) -> None:
    plan = plan_of(run_file(tmp_path, "secured"))
    trainer = next(unit for unit in plan.units if unit.name == "trainer")
    assert (trainer.count, trainer.group, trainer.gpus) == (2, 8, 8)
    assert trainer.command("1")[-4:] == ["--index", "1", "--group-size", "8"]
    rollout = next(unit for unit in plan.units if unit.name == "rollout")
    assert (rollout.count, rollout.group, rollout.gpus) == (4, 1, 2)


def test_pods_on_gpus_are_on_the_machines_for_them(tmp_path: Path) -> None:
    by_role = {
        workload["metadata"]["labels"]["laminar/role"]: pod
        for workload, pod in pods(deployment(run_file(tmp_path, "secured")))
    }
    for role in ("trainer", "rollout", "relay"):
        assert by_role[role]["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
        assert by_role[role]["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert not any({"nodeSelector", "tolerations"} & by_role[role].keys() for role in ("score", "metrics", "topics"))
    ((apart,),) = (each.values() for each in by_role["trainer"]["affinity"].values())
    labels = {"laminar/run": "big-run", "laminar/role": "trainer"}
    assert apart == [{"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}]
    assert "affinity" not in by_role["rollout"]
    (spread,) = by_role["rollout"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"] == {**labels, "laminar/role": "rollout"}


def test_note_says_that_machines_without_gpus_get_relays(tmp_path: Path) -> None:
    """A relay requests no GPU, so only labels keep its pods, with all weights, from the other machines."""
    note = plan_of(run_file(tmp_path, "secured"), ("deploy.node_labels={}",)).note
    assert "deploy.node_labels is empty: on Kubernetes every machine gets a relay" in note
    for name in ("secured", "example", "emulated"):  # the first has labels, the others no GPUs
        assert "node_labels" not in plan_of(run_file(tmp_path, name)).note, name


def test_shards_are_pods_of_one_workload(tmp_path: Path) -> None:
    """A Deployment of one shard would stay beside the StatefulSet of two, and fence its pods."""
    for shards in (1, 2):
        documents = resources(files_of(plan_of(run_file(tmp_path, "example"), (f"score.shards={shards}",))))
        names = {each["metadata"]["name"]: each for each in documents if "template" in each.get("spec", {})}
        score = names["laminar-deployed-score"]
        assert (score["kind"], score["spec"]["replicas"]) == ("StatefulSet", shards)


def test_ranks_without_gpus_are_spread_over_the_machines(tmp_path: Path) -> None:
    files = files_of(plan_of(run_file(tmp_path, "secured"), ("trainer.device='cpu'",)))
    trainer = next(pod for each, pod in pods(resources(files)) if each["metadata"]["name"].endswith("-trainer"))
    assert "affinity" not in trainer, "there may be fewer machines than ranks"
    (spread,) = trainer["topologySpreadConstraints"]
    assert (spread["whenUnsatisfiable"], spread["topologyKey"]) == ("ScheduleAnyway", "kubernetes.io/hostname")
    assert spread["labelSelector"]["matchLabels"]["laminar/role"] == "trainer"


@pytest.mark.parametrize(("ranks", "strategy"), [(16, {"type": "OnDelete"}), (8, None)])
def test_ranks_of_several_pods_are_updated_together(tmp_path: Path, ranks: int, strategy: dict[str, str]) -> None:
    """A new rank does not meet rank 0 of another configuration, so a rolling update would wait for ever."""
    file = run_file(tmp_path, "secured")
    file.write_text(file.read_text().replace("ranks = 16", f"ranks = {ranks}"))
    found = {
        each["metadata"]["name"]: each["spec"].get("updateStrategy")
        for each in deployment(file)
        if each["kind"] == "StatefulSet"
    }
    assert found.pop("laminar-big-run-trainer") == strategy
    assert set(found.values()) == {None}


@pytest.mark.parametrize("version", VERSIONS)
def test_loader_has_the_volume_and_nothing_else(file: Path, version: str) -> None:
    plan = plan_of(file)
    loader = yaml.safe_load(files_of(plan)["kubernetes/loader.yaml"])
    kubernetes_validate.validate(loader, version, strict=True)
    assert loader["metadata"]["name"] == f"{plan.name}-loader"
    volumes = {each["name"]: each for each in loader["spec"]["volumes"]}
    assert volumes.keys() == {"temporary", "volume"}  # neither configuration nor Secrets exist before
    assert volumes["volume"]["persistentVolumeClaim"] == {"claimName": plan.name}
    (container,) = loader["spec"]["containers"]
    mounts = {each["name"]: each for each in container["volumeMounts"]}
    assert mounts["volume"] == {"name": "volume", "mountPath": plan.deploy.volume_path}
    assert loader["spec"].get("nodeSelector", {}) == plan.deploy.node_labels  # the claim may be bound to its zone
    assert [each["key"] for each in loader["spec"]["tolerations"]] == list(plan.deploy.tolerations)
    roles = (pod for each, pod in pods(deployment(file)) if each["kind"] == "Deployment")
    assert all(loader["spec"]["securityContext"] == pod["securityContext"] for pod in roles)


@pytest.mark.parametrize("version", VERSIONS)
def test_export_job_writes_to_the_volume_as_its_own_user(file: Path, version: str) -> None:
    plan = plan_of(file)
    files = files_of(plan)
    job = yaml.safe_load(files["kubernetes/export.yaml"])
    kubernetes_validate.validate(job, version, strict=True)
    assert "export.yaml" not in files["kubernetes/kustomization.yaml"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounts = {each["name"]: each for each in container["volumeMounts"]}
    assert mounts.keys() == {each["name"] for each in pod["volumes"]}
    assert "config" not in mounts, "only the kustomization knows the ConfigMap's name"
    assert mounts["volume"] == {"name": "volume", "mountPath": plan.deploy.volume_path}
    options = container["command"][2:]
    parsed = typer.main.get_command(app).commands["topic"].make_context("topic", options).params  # type: ignore[attr-defined]
    assert parsed["folder"].is_relative_to(plan.deploy.volume_path)
    assert (parsed["topic"], parsed["run"], parsed["brokers"]) == ("experiences", plan.run, plan.brokers)
    secret = f"{plan.name}-kafka-export"
    assert (secret in files["kubernetes/secrets.sh"]) == (secret in str(pod["volumes"])) == plan.authenticated
    assert str(parsed["command_config"]) == ("/etc/laminar-secrets/export.properties" if plan.authenticated else "None")


def test_gpus_are_requested_only_by_runs_on_gpus(tmp_path: Path) -> None:
    from pipelines.config import load_config

    units = units_of(load_config(run_file(tmp_path, "example")))
    assert not any(unit.gpus for unit in units)
    assert {unit.name for unit in units if unit.weights} == {"rollout", "trainer", "relay"}
    assert not any(unit.weights for unit in units_of(load_config(run_file(tmp_path, "emulated"))))


def test_memory_requests_follow_from_the_model(tmp_path: Path) -> None:
    from end_to_end.small_runs import make_model

    from pipelines.config import load_config
    from pipelines.run.deployment import PROCESS_GIB

    file = run_file(tmp_path, "example")
    assert "set deploy.model_folder" in plan_of(file).note
    change = f"deploy.model_folder='{make_model(tmp_path / 'model', layers=1)}'"
    assert plan_of(file, (change,)).note == ""
    small = {unit.name: unit.memory_gib for unit in units_of(load_config(file, [change]))}
    assert small["relay"] == PROCESS_GIB + 1
    assert small["rollout"] >= PROCESS_GIB + 1
    assert all(unit.memory_gib >= small[unit.name] for unit in units_of(load_config(file)))


def test_requests_of_roles_can_be_set(tmp_path: Path) -> None:
    changes = ("deploy.memory_gib={trainer = 64, score = 3}", "deploy.cpus={score = 0.5}")
    units = {unit.name: unit for unit in plan_of(run_file(tmp_path, "secured"), changes).units}
    assert (units["trainer"].memory_gib, units["trainer"].cpus) == (64 * 8, 8 * 8), "eight ranks share a container"
    assert (units["score"].memory_gib, units["score"].cpus) == (3, 0.5)
    for change, reason in (
        ("deploy.cpus={scores = 2}", "deploy.cpus has 'scores', which is no role of this run: autoscaler, "),
        ("deploy.memory_gib={agents = 2}", "deploy.memory_gib has 'agents', which is no role of this run"),
        ("deploy.cpus={score = 0}", r"--set: deploy\.cpus: score must be positive, not 0"),
    ):
        with pytest.raises(ConfigError, match=reason):
            plan_of(run_file(tmp_path, "secured"), (change,))


def test_memory_request_of_a_rank_has_what_its_gpu_offloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from end_to_end.small_runs import make_model

    from operators.trainer.memory_plan import ModelShape
    from pipelines.config import load_config
    from pipelines.run import deployment

    parameters = 1 << 30
    monkeypatch.setattr(deployment, "shape_of", lambda _: ModelShape(parameters, 0, 0, 1, 1, 1, 1))
    folder = f"deploy.model_folder='{make_model(tmp_path / 'model', layers=1)}'"

    def request(*changes: str) -> int:
        return deployment.host_memory(load_config(run_file(tmp_path, "secured"), [folder, *changes]))["trainer"]

    offload = "trainer.learner.offload=['moments']"
    # Bytes a parameter of the moments, on four ranks; torch rounds pinned memory up to twice as much. Eight in a pod.
    assert request(offload, "trainer.shard_ranks=4") - request() == 8 * 2 * 8 // 4
    more = request("relay.keep_versions=9") - request("relay.keep_versions=4")
    assert more == 5 * 2, "all ranks of a pod share its machine's versions"
    on_cpus = ("trainer.device='cpu'", "trainer.shard_ranks=4")
    assert request(*on_cpus, offload) == request(*on_cpus)
    assert request(*on_cpus) > request(*on_cpus[:1])


def test_each_role_has_its_own_secret_and_kafka_user(tmp_path: Path) -> None:
    documents = deployment(run_file(tmp_path, "secured"))
    for workload, pod in pods(documents):
        secrets = next(each for each in pod["volumes"] if each["name"] == "secrets")["projected"]["sources"]
        kafka = [each["secret"]["name"] for each in secrets if "-kafka-" in each["secret"]["name"]]
        role = workload["metadata"]["labels"]["laminar/role"]
        user = {"topics": "admin", "acls": "admin", "metrics": "people"}.get(role, role)
        assert kafka == [f"laminar-big-run-kafka-{user}"]
    users = {
        each["metadata"]["name"].removeprefix("laminar-big-run-"): each
        for each in documents
        if each["kind"] == "KafkaUser"
    }
    topics = [each["spec"]["topicName"] for each in documents if each["kind"] == "KafkaTopic"]
    assert sorted(topics) == sorted(topic.name("big-run") for topic in CATALOGUE.values())
    assert {"score", "trainer", "people"} <= users.keys()
    rules = users["score"]["spec"]["authorization"]["acls"]
    assert all(rule["operations"] for rule in rules)
    assert [rule["operations"] for rule in rules if rule["resource"] == {"type": "cluster"}] == [["DescribeConfigs"]]
    settings = [each["spec"] for each in documents if each["kind"] == "KafkaTopic"]
    assert {(each["replicas"], each["config"]["min.insync.replicas"]) for each in settings} == {(3, "2")}


def test_runs_of_one_kafka_share_no_strimzi_user(tmp_path: Path) -> None:
    """The rights of a KafkaUser are those of its last manifest."""
    (tmp_path / "other").mkdir()
    names = [
        {each["metadata"]["name"] for each in deployment(file) if each["kind"] == "KafkaUser"}
        for file in (run_file(tmp_path, "secured"), _renamed(run_file(tmp_path / "other", "secured")))
    ]
    assert all(names)
    assert not names[0] & names[1]


def _renamed(file: Path) -> Path:
    file.write_text(file.read_text().replace("big-run", "other"))
    return file


def test_restoring_roles_have_their_time_before_they_are_alive(file: Path) -> None:
    for workload, pod in pods(deployment(file)):
        for container in pod["containers"]:
            if (probe := container.get("startupProbe")) and "submit" in container["command"]:
                assert probe["periodSeconds"] * probe["failureThreshold"] >= 3600, workload["metadata"]["name"]


def test_autoscaler_may_change_the_number_of_rollouts_alone(tmp_path: Path) -> None:
    documents = deployment(run_file(tmp_path, "secured"))
    by_kind = {kind: [each for each in documents if each["kind"] == kind] for kind in ("Role", "RoleBinding")}
    ((role,), (binding,)) = by_kind["Role"], by_kind["RoleBinding"]
    assert role["rules"] == [
        {
            "apiGroups": ["apps"],
            "resources": ["statefulsets/scale"],
            "resourceNames": ["laminar-big-run-rollout"],
            "verbs": ["patch"],
        }
    ]
    name = "laminar-big-run-autoscaler"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": name, "namespace": "rl"}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"] == name
    (account,) = [each for each in documents if each["kind"] == "ServiceAccount"]
    assert account["metadata"]["name"] == name
    pod = next(spec for workload, spec in pods(documents) if workload["metadata"]["name"] == name)
    assert pod["serviceAccountName"] == name
    (policy,) = [each for each in documents if each["kind"] == "NetworkPolicy" and each["metadata"]["name"] == name]
    assert {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]} == {443, 6443}


def test_only_gateways_mount_the_key_of_their_certificate(tmp_path: Path) -> None:
    file = run_file(tmp_path, "agents")
    script = files_of(plan_of(file))["kubernetes/secrets.sh"]
    made = {line.split()[4]: line.split()[7:-1] for line in script.splitlines() if line.startswith("kubectl")}
    assert made["laminar-deployed-gateway-files"] == ["--from-file=gateway.pem"]
    assert made["laminar-deployed-agent-files"] == ["--from-file=gateway-secret", "--from-file=ca.pem"]
    mounted: dict[str, set[str]] = {}
    for workload, pod in pods(deployment(file)):
        volumes = [each["projected"]["sources"] for each in pod["volumes"] if "projected" in each]
        names = {each["secret"]["name"].removeprefix("laminar-deployed-") for each in volumes[0]}
        mounted[workload["metadata"]["labels"]["laminar/role"]] = names
    users = {role: names for role, names in mounted.items() if names & {"gateway-files", "agent-files"}}
    assert users == {"gateway": {"gateway-files", "agent-files"}, "agents": {"agent-files"}}


def test_memory_request_of_agents_has_their_programs(tmp_path: Path) -> None:
    units = {unit.name: unit for unit in plan_of(run_file(tmp_path, "agents")).units}
    more = {unit.name: unit for unit in plan_of(run_file(tmp_path, "agents"), ("agents.concurrency=64",)).units}
    assert more["agents"].memory_gib - units["agents"].memory_gib == (64 - 16) / 4
    assert (units["gateway"].count, units["gateway"].port) == (2, 8443)


def test_rollouts_have_as_long_to_end_as_their_notice(tmp_path: Path) -> None:
    seconds = {
        workload["metadata"]["name"]: pod["terminationGracePeriodSeconds"]
        for workload, pod in pods(deployment(run_file(tmp_path, "secured")))
    }
    assert seconds["laminar-big-run-rollout"] == 120
    assert seconds["laminar-big-run-trainer"] == 60


@pytest.mark.parametrize("name", ["example", "emulated"])
def test_accounts_are_written_only_for_an_autoscaler(name: str, tmp_path: Path) -> None:
    documents = deployment(run_file(tmp_path, name))
    assert not {each["kind"] for each in documents} & {"Role", "RoleBinding", "ServiceAccount"}


def test_deployment_rejects_the_local_autoscaler(tmp_path: Path) -> None:
    file = run_file(tmp_path, "emulated")
    file.write_text(file.read_text() + "[autoscaling]\n")
    with pytest.raises(ConfigError, match=r"autoscaling\.actuator is 'local': in a cluster set 'kubernetes'"):
        plan_of(file)
