"""Network policies: pods connect to Kafka, object stores and the gateway at the ports of the run, to nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from deployments import deployment, run_file

from infra.kafka.properties import ClientProperties
from pipelines.config import ConfigError
from pipelines.run.deployment import files_of, plan_of


def test_brokers_of_the_policies_are_those_of_the_run(tmp_path: Path) -> None:
    documents = deployment(run_file(tmp_path, "secured"))
    policy = next(each for each in documents if each["metadata"]["name"] == "laminar-big-run-all")
    ports = {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]}
    servers = ClientProperties.at("one:9093,two:9094").bootstrap_servers
    assert ports == {53, *(int(each.rpartition(":")[2]) for each in servers.split(","))}


def test_policies_allow_object_stores_and_extra_ports(tmp_path: Path) -> None:
    file = run_file(tmp_path, "secured")
    store = 'object_store = "s3://weights/runs?endpoint_override=minio:9000&scheme=http"'
    file.write_text(file.read_text().replace("[relay]", f"[relay]\n{store}"))

    def ports(name: str, *changes: str) -> list[int]:
        texts = files_of(plan_of(file, changes))["kubernetes/network.yaml"]
        (policy,) = (
            each for each in yaml.safe_load_all(texts) if each["metadata"]["name"] == f"laminar-big-run-{name}"
        )
        return [port["port"] for rule in policy["spec"]["egress"] for port in rule.get("ports", ())]

    extra = "deploy.extra_egress_ports=[9194, 9195]"
    assert ports("weights") == [443, 9000]
    assert ports("weights", extra) == [443, 9000, 9194, 9195]
    assert ports("all", extra) == [53, 53, 9093, 9094, 9194, 9195]
    with pytest.raises(ConfigError, match="extra_egress_ports must be at most 65535, not 70000"):
        plan_of(file, ("deploy.extra_egress_ports=[70000]",))


def test_agents_may_connect_to_the_gateway_alone(tmp_path: Path) -> None:
    file = run_file(tmp_path, "agents")
    name, agents = "laminar-deployed-gateway", {"laminar/run": "deployed", "laminar/role": "agents"}
    gateway, port = {**agents, "laminar/role": "gateway"}, {"protocol": "TCP", "port": 8443}

    def found(kind: str, name: str, *changes: str) -> dict[str, Any]:
        texts = {key: text for key, text in files_of(plan_of(file, changes)).items() if key.endswith("network.yaml")}
        documents = [each for text in texts.values() for each in yaml.safe_load_all(text)]
        (spec,) = [each["spec"] for each in documents if (each["kind"], each["metadata"]["name"]) == (kind, name)]
        return dict(spec)

    service = found("Service", name)
    assert (service["type"], service["selector"]) == ("ClusterIP", gateway)
    assert service["ports"] == [{"name": "gateway", "port": 8443, "targetPort": "gateway"}]
    policy = found("NetworkPolicy", name)
    assert policy["podSelector"]["matchLabels"] == gateway
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": agents}}], "ports": [port]}]
    policy = found("NetworkPolicy", "laminar-deployed-agents")
    assert (policy["podSelector"]["matchLabels"], policy["policyTypes"]) == (agents, ["Egress"])
    assert policy["egress"] == [{"to": [{"podSelector": {"matchLabels": gateway}}], "ports": [port]}]

    outside = "deploy.gateway_service=LoadBalancer"
    assert found("Service", name, outside)["type"] == "LoadBalancer"
    assert found("NetworkPolicy", name, outside)["ingress"] == [{"ports": [port]}]
