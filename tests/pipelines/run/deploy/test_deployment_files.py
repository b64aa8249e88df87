"""Deployment files: every role of a configuration, with valid commands; the files in the repository are current."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from infra.deploy.units import ALIVE, CONFIG
from infra.runners.liveness import VARIABLE
from pipelines.cli.submit import app
from pipelines.config import load_config
from pipelines.roles import PIPELINES, roles_of
from pipelines.run.deployment import EXAMPLE, files_of, plan_of, units_of

ROOT = Path(__file__).parents[4]
PLAN = plan_of(ROOT / EXAMPLE)
FILES = files_of(PLAN)
ROLES = sorted(role.name for role in roles_of(load_config(ROOT / EXAMPLE)))


def submitted(command: list[str]) -> str:
    """The role that a command submits, as parsed by `laminar submit`."""
    assert command[:2] == ["laminar", "submit"], command
    parsed: dict[str, Any] = typer.main.get_command(app).make_context("submit", command[2:]).params
    assert str(parsed["config"]) == CONFIG
    assert parsed["pipeline"] in PIPELINES
    return f"{parsed['pipeline']}-{parsed['index']}"


def indexed(name: str) -> str:
    return name if name[-1].isdigit() else f"{name}-0"


@pytest.mark.parametrize("name", FILES)
def test_deployment_files_in_the_repository_are_current(name: str) -> None:
    text = (ROOT / "infra" / "deploy" / "files" / name).read_text()
    assert text == FILES[name], f"out of date: run `laminar deploy {EXAMPLE} infra/deploy/files`"


def test_deployment_folder_has_no_other_files() -> None:
    folder = ROOT / "infra" / "deploy" / "files"
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == sorted(FILES)


def test_compose_file_has_a_service_for_every_role() -> None:
    compose = yaml.safe_load(FILES["compose.yaml"])
    services = {name: each for name, each in compose["services"].items() if "laminar" in str(each.get("command"))}
    assert sorted(submitted(each["command"]) for each in services.values()) == sorted(map(indexed, ROLES))
    for each in services.values():
        assert each["depends_on"] == {"kafka": {"condition": "service_healthy"}}
        assert ALIVE in each["healthcheck"]["test"][1]
        assert each["environment"] == {VARIABLE: ALIVE}
    assert compose["services"]["kafka"]["environment"]["KAFKA_AUTO_CREATE_TOPICS_ENABLE"] == "false"
    assert compose["services"]["flink"]["profiles"] == ["flink"]


def test_kubernetes_has_a_workload_with_probes_for_every_role() -> None:
    documents = list(yaml.safe_load_all(FILES["kubernetes.yaml"]))
    assert documents[0]["data"]["run.toml"] == (ROOT / EXAMPLE).read_text()
    workloads = [each for each in documents if each["kind"] in ("Deployment", "StatefulSet")]
    found = []
    for each in workloads:
        spec = each["spec"]
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
        for container in spec["template"]["spec"]["containers"]:
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()
            command = container["command"]
            line = command[2].removeprefix("exec ") if command[0] == "sh" else " ".join(command)
            found += [submitted(_filled(line, pod)) for pod in range(spec["replicas"])]
    assert each["kind"] in ("Deployment", "StatefulSet", "Service")
    relays = [name for name in found if name.startswith("relay")]
    # One relay on each machine with a rollout or the trainer.
    assert sorted(relays) == [f"relay-{n}" for n in range(len(relays))]
    assert len(relays) == 5
    assert sorted(set(found) - set(relays)) == sorted({indexed(name) for name in ROLES if "relay" not in name})
    single = {each["metadata"]["labels"]["role"] for each in workloads if each["kind"] == "Deployment"}
    assert single == {"prompts", "placement", "score", "evaluation"}


def _filled(command: str, pod: int) -> list[str]:
    """`command` with the variables of pod number `pod`."""
    filled = command.replace("$(POD_INDEX)", str(pod)).replace("${POD_IP}", "10.0.0.1")
    if "$((" in filled:
        before, _, rest = filled.partition("$((")
        expression, _, after = rest.partition("))")
        first = int(expression.partition("+")[2])
        filled = f"{before}{pod + first}{after}"
    return filled.split()


def test_units_request_gpus_for_vllm_only() -> None:
    config = load_config(ROOT / EXAMPLE)
    with_vllm = replace(config, rollout=replace(config.rollout, engine="vllm"))
    assert {unit.name for unit in units_of(with_vllm) if unit.gpus} == {"rollout", "trainer"}
    assert not any(unit.gpus for unit in units_of(config))
