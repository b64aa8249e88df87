"""The Jobs for ACLs and topics, executed on three brokers with authentication: each container as a process with exactly
the network, mounts, rights and environment that its manifest gives it. Their Secrets are those of the run's script.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deployments import resources, run_file
from faults.cluster import CONTROLLER_PORT, PORT, START_S
from faults.cluster import Cluster as Brokers
from faults.network import Network, NoNetwork, within
from kafka.admin import (
    ACLFilter,
    ACLOperation,
    ACLPermissionType,
    ACLResourcePatternType,
    ResourcePatternFilter,
    ResourceType,
)
from pods import Cluster, Container, Pod
from waiting import until

from infra.certificates import Authority, write_relay_files
from infra.deploy.kubernetes.secrets import KAFKA_CA
from infra.deploy.plan import SECRETS, DeploymentPlan
from infra.files import write_private
from infra.kafka import broker
from infra.kafka.acls import Acl
from infra.kafka.admin import admin_client, describe, list_topics
from infra.kafka.broker_jars import JARS
from infra.kafka.java_properties import parse_properties, properties_text
from infra.kafka.properties import ClientProperties
from infra.kafka.security import ADMIN, BROKER, Security
from pipelines.run.deployment import files_of, plan_of

NAMES = ("k1", "k2", "k3")
KUBECTL = """#!/bin/sh -e
# kubectl create secret generic NAME --namespace NAMESPACE --from-file=FILE...
mkdir "$CREATED/$4"
for word; do case $word in --from-file=*) cp "${word#*=}" "$CREATED/$4" ;; esac; done
"""


class SecureBrokers(Brokers):
    """Brokers that require authentication, with a private authority and a user for each of `users`."""

    def __init__(self, network: Network, folder: Path, users: set[str], names: tuple[str, ...] = NAMES) -> None:
        super().__init__(network, names, folder)
        self._users = sorted(users)

    def security(self, name: str = NAMES[0]) -> Security:
        """The secrets, which all brokers share, for the broker `name`."""
        return Security(self.folder / "secure", self.network.hosts[name].address)

    def start(self) -> None:
        secure = self.security()
        secure.folder.mkdir(parents=True)
        authority, addresses = Authority.create(), [self.network.hosts[name].address for name in self.names]
        authority.write(secure.folder / "ca.pem", secure.folder / "ca.key")
        write_private(secure.folder / "broker.pem", authority.issue(BROKER, (*self.names, *addresses)))
        secure.create(self._users)
        secure.write_clients(f"{addresses[0]}:{PORT}")
        super().start()

    def client_of(self, *names: str, user: str = ADMIN) -> ClientProperties:
        servers = ",".join(f"{self.network.hosts[name].address}:{PORT}" for name in names)
        return ClientProperties.from_file(self.security().properties_file(user), bootstrap_servers=servers)

    def _format(self, node: int, name: str, cluster: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(broker, "random_id", lambda: cluster)
            jars = JARS.class_path(lambda _: None)
            broker.format_by_kafka(jars, self._properties(name), self.security().format_arguments())

    def _settings(self, node: int, name: str) -> dict[str, object]:
        one = {"default.replication.factor": 1, "min.insync.replicas": 1}  # topics have their own
        secure = self.security(name).server_properties(PORT, CONTROLLER_PORT)
        return {**super()._settings(node, name), **secure, **one}


def kafka_files(secure: Security, folder: Path) -> None:
    """Write the authority's certificate and each user's properties as an administrator gives them to secrets.sh."""
    (folder / KAFKA_CA).write_text((secure.folder / "ca.pem").read_text())
    for user in secure.users:
        file = secure.properties_file(user)
        password = file.with_suffix(".password")
        text = file.read_text().replace(f"${{file:{password.absolute()}}}", password.read_text().strip())
        entries = {**parse_properties(text), "ssl.truststore.location": f"{SECRETS}/{KAFKA_CA}"}
        (folder / file.name).write_text(properties_text(entries))


def created_secrets(script: str, files: Path, folder: Path) -> Mapping[str, Path]:
    """The Secrets that the script creates from `files`, as folders by name."""
    created = folder / "created"
    created.mkdir()
    (folder / "kubectl").write_text(KUBECTL)
    (folder / "kubectl").chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "CREATED": str(created)}
    subprocess.run(["sh", "-c", script, "secrets.sh", str(files)], env=environment, check=True)
    return {each.name: each for each in created.iterdir()}


def jobs(plan: DeploymentPlan, network: Network, folder: Path, files: Path) -> dict[str, Container]:
    """The containers of the Jobs by role, on one host."""
    manifests = files_of(plan)
    (folder / "config").mkdir(mode=0o755)
    (folder / "config" / "run.toml").write_text(manifests["kubernetes/run.toml"])
    cluster = Cluster(
        network,
        folder,
        config_maps={plan.name: folder / "config"},
        secrets=created_secrets(manifests["kubernetes/secrets.sh"], files, folder),
        claims={},
        nodes={},
        names={name: network.hosts[name].address for name in NAMES},
    )
    made = {}
    for each in resources(manifests):
        if each["kind"] == "Job":
            pod = Pod(cluster, each["metadata"]["name"], each["spec"]["template"], 0, "", network.hosts["jobs"])
            (made[each["metadata"]["labels"]["laminar/role"]],) = pod.containers
    return made


def stored_acls(admin: Any) -> set[Acl]:
    """All ACLs on Kafka, one operation each."""
    pattern = ResourcePatternFilter(ResourceType.ANY, None, ACLResourcePatternType.ANY)
    found, error = admin.describe_acls(ACLFilter(None, None, ACLOperation.ANY, ACLPermissionType.ANY, pattern))
    assert error.errno == 0, error
    return {
        Acl(
            each.principal.removeprefix("User:"),
            each.resource_pattern.resource_type.name.lower().replace("_", "-"),
            each.resource_pattern.resource_name,
            each.resource_pattern.pattern_type == ACLResourcePatternType.PREFIXED,
            (each.operation.name.title().replace("_", ""),),
        )
        for each in found
        if each.permission_type == ACLPermissionType.ALLOW
    }


@pytest.mark.slow
def test_jobs_create_acls_and_topics_on_a_secure_kafka(tmp_path: Path) -> None:
    plan = plan_of(run_file(tmp_path, "authenticated"))
    try:
        with Network((*NAMES, "jobs")) as network:
            brokers = SecureBrokers(network, tmp_path / "brokers", {acl.user for acl in plan.acls})
            try:
                brokers.start()
                write_relay_files(tmp_path / "files")
                kafka_files(brokers.security(), tmp_path / "files")
                (tmp_path / "pods").mkdir()
                made = jobs(plan, network, tmp_path / "pods", tmp_path / "files")
                assert made.keys() == {"acls", "topics"}
                for job in made.values():  # at a time, as Kubernetes does
                    job.start()
                for job in made.values():
                    assert job.wait(START_S) == 0, job.log.read_text()[-3000:]
                within(network.hosts["k1"], lambda: _check(brokers, plan))
            finally:
                brokers.stop()
    except NoNetwork as reason:
        pytest.skip(str(reason))


def _check(brokers: SecureBrokers, plan: DeploymentPlan) -> None:
    wanted = {topic.name: (topic.partitions, 3, "2") for topic in plan.topics}
    with admin_client(brokers.client) as admin:
        assert set(list_topics(admin)) == wanted.keys()
        found = describe(admin, list(wanted)).values()
        settings = {each.name: each.config.get("min.insync.replicas", "") for each in found}
        assert {each.name: (each.partitions, each.replication_factor, settings[each.name]) for each in found} == wanted
        assert {replace(acl, operations=(each,)) for acl in plan.acls for each in acl.operations} <= stored_acls(admin)
    with admin_client(brokers.client_of(*NAMES, user="people")) as people:
        until(lambda: set(list_topics(people)) == wanted.keys())  # brokers learn the ACLs from their controller
