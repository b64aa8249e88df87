"""Deployment files: every role of a configuration, with valid commands; the files in the repository are current."""

from __future__ import annotations

import base64
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import typer
import yaml
from deployments import CONFIG_TEXTS, ROOT, deployment, pods, run_file

from infra.deploy.plan import ALIVE, CONFIG, DATA_PLANE, METRICS_PORT
from infra.kafka.broker_jars import KAFKA_VERSION
from infra.machine import GATEWAY_URL
from pipelines.cli.main import main
from pipelines.cli.submit import app
from pipelines.config import ConfigError, ConfigProblems, load_config
from pipelines.roles import ALL_PIPELINES, relay_of, roles_of
from pipelines.run.deployment import EXAMPLE, files_of, plan_of

FILES = files_of(plan_of(ROOT / EXAMPLE))


def submitted(command: list[str]) -> list[str]:
    """The roles that a command submits, as parsed by `laminar submit`."""
    assert command[:2] == ["laminar", "submit"], command
    parsed: dict[str, Any] = typer.main.get_command(app).make_context("submit", command[2:]).params
    assert str(parsed["config"]) == CONFIG
    assert parsed["pipeline"] in ALL_PIPELINES
    size = parsed["group_size"]
    first = parsed["index"] or 0
    return [f"{parsed['pipeline']}-{index}" for index in range(first * size, (first + 1) * size)]


def indexed(name: str) -> str:
    return name if name[-1].isdigit() else f"{name}-0"


@pytest.mark.parametrize("name", FILES)
def test_deployment_files_in_the_repository_are_current(name: str) -> None:
    text = (ROOT / "infra" / "deploy" / "files" / name).read_text()
    assert text == FILES[name], "out of date: `make generated`"


def test_deployment_folder_has_no_other_files() -> None:
    folder = ROOT / "infra" / "deploy" / "files"
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == sorted(FILES)


@pytest.mark.parametrize("name", CONFIG_TEXTS)
def test_compose_file_has_a_service_for_every_role(name: str, tmp_path: Path) -> None:
    file = run_file(tmp_path, name)
    compose = yaml.safe_load(files_of(plan_of(file, ("deploy.gpus_per_machine=24",)))["compose.yaml"])
    services = {key: each for key, each in compose["services"].items() if "submit" in each.get("command", ())}
    expected = sorted(indexed(role.name) for role in roles_of(load_config(file)))
    found = [role for each in services.values() for role in submitted(_without_machine(each["command"]))]
    assert sorted(found) == expected
    for each in services.values():
        assert each["depends_on"] == {"kafka": {"condition": "service_healthy"}}
        assert "laminar-alive" in each["healthcheck"]["test"][1]
        assert each["environment"]["LAMINAR_ALIVE_FILE"] == ALIVE
    assert compose["services"]["kafka"]["environment"]["KAFKA_AUTO_CREATE_TOPICS_ENABLE"] == "false"


def test_compose_containers_share_no_gpu(tmp_path: Path) -> None:
    file = run_file(tmp_path, "secured")
    services = yaml.safe_load(files_of(plan_of(file, ("deploy.gpus_per_machine=24",)))["compose.yaml"])["services"]
    devices = {
        name: each["deploy"]["resources"]["reservations"]["devices"]
        for name, each in services.items()
        if "deploy" in each
    }
    counts = {"trainer-0": 16, **{f"rollout-{index}": 2 for index in range(4)}}
    assert {name: len(each[0]["device_ids"]) for name, each in devices.items()} == counts
    assert all((each[0]["driver"], each[0]["capabilities"]) == ("nvidia", ["gpu"]) for each in devices.values())
    assert sorted(int(gpu) for each in devices.values() for gpu in each[0]["device_ids"]) == list(range(24))


def test_compose_file_is_left_out_if_one_machine_lacks_gpus(tmp_path: Path) -> None:
    plan = plan_of(run_file(tmp_path, "secured"), ("deploy.gpus_per_machine=16",))
    assert not {"compose.yaml", "run.toml"} & files_of(plan).keys()
    assert "no compose.yaml is written: the containers need 24 GPUs (rollout 8, trainer 16), and a machine has 16" in (
        plan.note
    )


def test_deploy_names_a_compose_file_that_it_left_out(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    file, folder = str(run_file(tmp_path, "secured")), tmp_path / "cluster"
    code, text, _ = command("deploy", file, str(folder), "--set", "deploy.gpus_per_machine=16")
    assert (code, "compose.yaml" in text, (folder / "run.toml").exists()) == (0, False, False)
    assert command("deploy", file, str(folder), "--set", "deploy.gpus_per_machine=24")[0] == 0
    code, _, notes = command("deploy", file, str(folder), "--set", "deploy.gpus_per_machine=16")
    assert (code, f"{folder}/compose.yaml is of an earlier configuration: remove it" in notes) == (0, True)


def test_rank_0_has_the_configured_name_in_a_compose_file(tmp_path: Path) -> None:
    file = run_file(tmp_path, "secured")
    services = yaml.safe_load(files_of(plan_of(file, ("trainer.device='cpu'",)))["compose.yaml"])["services"]
    aliases = {"aliases": [load_config(file).trainer.rank_0_host]}
    assert (services["trainer-0"]["networks"], "networks" in services["trainer-1"]) == ({"default": aliases}, False)


@pytest.mark.parametrize(
    ("ranks", "gpus", "pods"), [(16, 8, 2), (12, 8, 2), (6, 8, 1), (7, 4, 7), (9, 8, 3), (16, 24, 1), (1, 8, 1)]
)
def test_pods_have_as_many_ranks_as_fit(ranks: int, gpus: int, pods: int, tmp_path: Path) -> None:
    changes = (f"trainer.ranks={ranks}", f"deploy.gpus_per_machine={gpus}")
    (trainer,) = (each for each in plan_of(run_file(tmp_path, "secured"), changes).units if each.name == "trainer")
    assert (trainer.count, trainer.group * trainer.count, trainer.gpus) == (pods, ranks, ranks // pods)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("kafka.bootstrap_servers='kafka'", "kafka.bootstrap_servers is 'kafka': not a list of host:port,host:port"),
        ("relay.object_store='s3://b/x?endpoint_override=host:abc'", "object_store: Port could not be cast"),
        ("trainer.checkpoint_folder='file:///elsewhere/x'", "trainer.checkpoint_folder is '/elsewhere/x', but must be"),
    ],
)
def test_deploy_names_settings_that_have_no_port_or_place(change: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        plan_of(run_file(tmp_path, "secured"), (change,))


def test_deploy_takes_brokers_with_a_comma_at_the_end(tmp_path: Path) -> None:
    plan = plan_of(run_file(tmp_path, "secured"), ("kafka.bootstrap_servers='one:9093,two:9094,'",))
    assert "9094" in files_of(plan)["kubernetes/network.yaml"]


def test_compose_containers_have_the_time_of_their_role_to_end(tmp_path: Path) -> None:
    file = run_file(tmp_path, "secured")
    services = yaml.safe_load(files_of(plan_of(file, ("deploy.gpus_per_machine=24",)))["compose.yaml"])["services"]
    assert (services["rollout-0"]["stop_grace_period"], services["score-0"]["stop_grace_period"]) == ("120s", "60s")


def test_compose_kafka_keeps_its_log_in_its_volume() -> None:
    kafka = yaml.safe_load(FILES["compose.yaml"])["services"]["kafka"]
    assert kafka["volumes"] == [f"kafka:{kafka['environment']['KAFKA_LOG_DIRS']}"]
    assert len(base64.urlsafe_b64decode(f"{kafka['environment']['CLUSTER_ID']}==")) == 16
    assert kafka["image"] == f"apache/kafka:{KAFKA_VERSION}"


def test_images_of_kafka_and_flink_can_be_pinned(tmp_path: Path) -> None:
    digest = "@sha256:" + "0" * 64
    images = {"kafka_image": f"apache/kafka{digest}", "flink_image": f"flink{digest}"}
    changes = [f"deploy.{name}='{image}'" for name, image in images.items()]
    files = files_of(plan_of(run_file(tmp_path, "flink"), (*changes, "deploy.gpus_per_machine=24")))
    assert yaml.safe_load(files["compose.yaml"])["services"]["kafka"]["image"] == images["kafka_image"]
    cluster = next(yaml.safe_load_all(files["kubernetes/flink.yaml"]))
    assert cluster["spec"]["image"] == images["flink_image"]


def test_note_names_a_replication_below_three(tmp_path: Path) -> None:
    file = run_file(tmp_path, "example")
    assert "replication_factor" not in plan_of(file).note
    few = plan_of(file, ("kafka.replication_factor=2",)).note
    assert "kafka.replication_factor is 2: topics get no min.insync.replicas" in few


@pytest.mark.parametrize("form", ["section", "inline", "dotted"])
def test_topics_on_kubernetes_have_three_copies_by_default(form: str, tmp_path: Path) -> None:
    file = run_file(tmp_path, "authenticated")
    text = file.read_text()
    address = 'bootstrap_servers = "k1:9092,k2:9092,k3:9092"\n'
    forms = {"inline": f"kafka = {{{address.strip()}}}\n", "dotted": f"kafka.{address}"}
    if form != "section":
        file.write_text(forms[form] + re.sub(r"\[kafka\]\n.*?(?=\[model\])", "", text, flags=re.DOTALL))
    plan = plan_of(file)
    files = files_of(plan)
    before, after = (tomllib.loads(files[name])["kafka"] for name in ("run.toml", "kubernetes/run.toml"))
    assert after == {**before, "replication_factor": 3}
    assert {(topic.replication_factor, topic.config["min.insync.replicas"]) for topic in plan.topics} == {(3, "2")}
    if form == "section":
        lines = files["kubernetes/run.toml"].splitlines(keepends=True)
        kept = "".join(line for line in lines if not line.startswith("replication_factor"))
        assert kept == files["run.toml"] == text, "comments stay"


@pytest.mark.parametrize("copies", [-1, 1, 5])
def test_own_number_of_copies_holds_on_kubernetes(copies: int, tmp_path: Path) -> None:
    file = run_file(tmp_path, "authenticated")
    text = file.read_text().replace("[kafka]\n", f"[kafka]\nreplication_factor = {copies}\n")
    file.write_text(text)
    plan = plan_of(file)
    assert files_of(plan)["kubernetes/run.toml"] == text
    assert {topic.replication_factor for topic in plan.topics} == {copies}
    assert ("topics get no min.insync.replicas" in plan.note) == (copies < 3)


def test_compose_serves_the_metrics_on_this_machine() -> None:
    metrics = yaml.safe_load(FILES["compose.yaml"])["services"]["metrics"]
    assert metrics["command"][:3] == ["laminar", "metrics", "serve"]
    assert "--audit-every" in metrics["command"], "a deployed run is audited, too"
    assert metrics["ports"] == [f"127.0.0.1:{METRICS_PORT}:{METRICS_PORT}"]


def test_audits_and_exports_have_the_time_out_of_the_run(tmp_path: Path) -> None:
    plan = plan_of(run_file(tmp_path, "secured"), ("kafka.transaction_timeout_s=90",))
    for command in (plan.metrics_command(), plan.export_command()):
        assert command[command.index("--transaction-timeout") + 1] == "90"


def test_deploy_writes_a_configuration_that_containers_can_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = os.umask(0o077)  # as the command sets it
    try:
        with pytest.raises(SystemExit) as ended:
            main(["deploy", str(ROOT / EXAMPLE), str(tmp_path / "files")])
    finally:
        os.umask(before)
    assert not ended.value.code
    assert "the roles start (docs/deploy.md has the commands): /laminar/model (model.path)" in capsys.readouterr().err
    assert (tmp_path / "files" / "run.toml").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("name", CONFIG_TEXTS)
def test_kubernetes_has_a_workload_for_every_role(name: str, tmp_path: Path) -> None:
    file = run_file(tmp_path, name)
    found: list[str] = []
    roles, together = roles_of(load_config(file)), plan_of(file).data_plane
    for document, pod in pods(deployment(file)):
        for command in (container["command"] for container in pod["containers"]):
            if command[:3] == ["laminar", "submit", DATA_PLANE]:
                found += [indexed(role.name) for role in roles if role.pipeline in together]
            elif command[:2] == ["laminar", "submit"]:
                for index in range(document["spec"].get("replicas", 1)):
                    found += submitted(_without_machine([word.replace("$(POD_INDEX)", str(index)) for word in command]))
    assert sorted(found) == sorted(indexed(role.name) for role in roles)


def _without_machine(command: list[str]) -> list[str]:
    """The command with number 0 instead of a machine's name."""
    if "--machine" not in command:
        return command
    at = command.index("--machine")
    return [*command[:at], "--index", "0", *command[at + 2 :]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("run.name=''", "run.name is not set"),
        (
            "run.name='Big_run'",
            "run.name is 'Big_run': a deployed run has at most 33 lower-case letters, digits and '-'",
        ),
        ("run.name='a-'", "run.name is 'a-'"),
        (f"run.name='{'a' * 34}'", "(laminar-NAME-experience may have 52 characters)"),
        ("kafka.bootstrap_servers=''", "kafka.bootstrap_servers is not set"),
        ("model.path='/models/base'", "model.path is '/models/base', but must be below deploy.volume_path"),
        ("run.folder='runs'", "run.folder is 'runs', but must be below deploy.volume_path"),
        (
            "trainer.ranks=2",
            "set laminar-deployed-trainer-0.laminar-deployed-trainer",
        ),
        ("relay.listen='127.0.0.1'", "relay.listen is 127.0.0.1"),
        ("relay.token_file='/root/token'", "relay.token_file is '/root/token', but must be in /etc/laminar-secrets"),
        ("rollout.gpus=[0,1]", "rollout.gpus is [0, 1]: a container sees only its own GPUs"),
        ("kafka.client_properties='/etc/laminar-secrets/all.properties'", "must name {role}.properties"),
    ],
)
def test_deploy_rejects_what_pods_cannot_run(change: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(ROOT / EXAMPLE, (change,))
    assert reason in str(caught.value)


def test_deploy_accepts_the_longest_run_name(tmp_path: Path) -> None:
    for name, longest in (("example", 33), ("flink", 31)):
        file = run_file(tmp_path, name)
        run = "a" * longest
        assert plan_of(file, (f"run.name='{run}'",)).name == f"laminar-{run}"
        with pytest.raises(ConfigError, match=f"a deployed run has at most {longest} lower-case letters"):
            plan_of(file, (f"run.name='{run}a'",))


def test_deploy_lists_all_problems_and_files_outside_the_volume(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    text = (ROOT / EXAMPLE).read_text().replace('"0.0.0.0"', '"127.0.0.1"').replace('name = "deployed"', "")
    prompts = 'source = "jsonl"\npath = "rows.jsonl"\n'
    rewards = '[score]\nrewards = [{name = "mine.py:score"}]\n'
    text = text.replace('task = "chain_sum"', prompts).replace("heldout = 64", 'heldout_path = "/laminar/held.jsonl"')
    file.write_text(text + rewards + '[[rollout.environments]]\nname = "game.py:Game"\n')
    with pytest.raises(ConfigProblems, match=r"run\.toml cannot be deployed: 7 problems") as caught:
        plan_of(file, ("trainer.optimizer_steps=0", "deploy.imag=x"))
    below = (
        "but must be below deploy.volume_path (/laminar), which all containers mount: copy it there, and set the path"
    )
    for problem in (
        "--set: unknown key deploy.imag; did you mean 'image'?",
        "--set: trainer: optimizer_steps must be at least 1, not 0",
        "run.name is not set: it names the topics to read and write",
        f"prompts.path is '{tmp_path}/rows.jsonl', {below} /laminar/rows.jsonl",
        f"rollout.environments is '{tmp_path}/game.py', {below} /laminar/game.py",
        f"score.rewards is '{tmp_path}/mine.py', {below} /laminar/mine.py",
    ):
        assert problem in caught.value.detail_lines
    assert any(each.startswith("relay.listen is 127.0.0.1") for each in caught.value.detail_lines)


def test_deploy_command_lists_all_of_a_local_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.toml"
    file.write_text('[model]\npath = "model"\n[prompts]\nsource = "jsonl"\npath = "rows.jsonl"\n')
    code, _, err = command("deploy", "run.toml", "cluster")
    assert (code, "6 problems" in err) == (1, True), err
    secrets = 'token_file = "{0}/relay-token", certificate_file = "{0}/relay.pem", authority_file = "{0}/ca.pem"'
    relay = f'listen = "0.0.0.0", {secrets.format("/etc/laminar-secrets")}'
    assert f"set in [relay] {relay}" in err
    mended = {"run": {"name": "first", "folder": "/laminar/runs"}, "kafka": {"bootstrap_servers": "kafka:9092"}}
    mended |= {"model": {"path": "/laminar/model"}, "prompts": {"source": "jsonl", "path": "/laminar/rows.jsonl"}}
    file.write_text(tomli_w.dumps(mended) + "[relay]\n" + relay.replace(", ", "\n"))
    assert command("deploy", "run.toml", "cluster")[0] == 0
    blocks = re.findall(r"```toml\n(\[relay\]\n.*?)```", (ROOT / "docs" / "deploy.md").read_text(), re.DOTALL)
    assert len(blocks) == 2  # of containers, and of hosts
    for block in blocks:
        file.write_text(tomli_w.dumps(mended) + block)
        load_config(file)


def test_deploy_lists_what_gateway_and_agents_lack(tmp_path: Path) -> None:
    changes = ["prompts.environment=agent", "agents.command=['python','my_agent.py']", "gateway={port=443}"]
    with pytest.raises(ConfigProblems) as caught:
        plan_of(ROOT / EXAMPLE, tuple(changes))
    assert list(caught.value.detail_lines) == [
        'gateway.host is 127.0.0.1: with "0.0.0.0", certificate_file and key_file agents can connect',
        "gateway.port is 443: set one from 1024 on, such as 8443, for its Service",
        "gateway.secret_file is not set: name a file in /etc/laminar-secrets, which gateway and agents read",
        "gateway.serve_requests is 4: deployed gateways answer agents alone; set 0",
        "agents.transcripts is true, but pods of agents cannot write to the volume: set false",
        "agents.command names 'my_agent.py': copy it to the volume, and set the path /laminar/my_agent.py",
    ]
    files = ("gateway.secret_file='/root/secret'", "gateway.port=8443", "agents.transcripts=false")
    with pytest.raises(ConfigError, match=r"gateway.secret_file is '/root/secret', but must be in /etc/laminar-secre"):
        plan_of(run_file(tmp_path, "agents"), files)


def test_note_names_what_agents_elsewhere_need(tmp_path: Path) -> None:
    file = run_file(tmp_path, "agents")
    assert "agents elsewhere" not in plan_of(file).note
    note = plan_of(file, ("agents.command=[]",)).note
    assert "Service laminar-deployed-gateway, port 8443" in note
    assert "`kubectl exec -n laminar laminar-deployed-gateway-0 -- laminar agents serve --config " in note


def test_compose_gateways_share_a_name_and_listen_on_loopback(tmp_path: Path) -> None:
    def services(*changes: str) -> dict[str, Any]:
        files = files_of(plan_of(run_file(tmp_path, "agents"), changes))
        found: dict[str, Any] = yaml.safe_load(files["compose.yaml"])["services"]
        return found

    found = services()
    gateways = [found["gateway-0"], found["gateway-1"]]
    assert [each["networks"]["default"]["aliases"] for each in gateways] == [["gateway"], ["gateway"]]
    assert [each.get("ports") for each in gateways] == [["127.0.0.1:8443:8443"], None]
    for each in (*gateways, found["agents-0"]):
        assert each["environment"][GATEWAY_URL] == "https://gateway:8443/v1"
    assert GATEWAY_URL not in found["score-0"]["environment"]
    assert services("deploy.gateway_service=NodePort")["gateway-0"]["ports"] == ["8443:8443"]


def test_relay_numbers_follow_from_machine_names() -> None:
    numbers = {relay_of(f"node-{n}") for n in range(1000)}
    assert len(numbers) == 1000
    assert all(0 <= number < 1 << 31 for number in numbers)
    assert relay_of("node-1") == relay_of("node-1") == 449547763
