"""The Secrets of a run: which files each role needs, and the commands that create them."""

from __future__ import annotations

import shlex
from pathlib import PurePosixPath

from infra.deploy.plan import AGENTS, GATEWAY, SECRETS, DeploymentPlan
from infra.deploy.role_acls import EXPORT, PEOPLE

RELAY = "relay-files"
GATEWAY_FILES, AGENT_FILES = "gateway-files", "agent-files"
ADMIN = "admin"
KAFKA_CA = "kafka-ca.pem"
"""The certificate of Kafka's authority, if that is a private one: in the Secret of each Kafka user."""


def secrets_of(plan: DeploymentPlan, user: str, *, weights: bool) -> list[str]:
    """The names of the Secrets that a pod of Kafka's user `user` mounts."""
    names = [plan.resource_name(f"kafka-{user}")] if plan.authenticated else []
    files = [RELAY] if weights and plan.relay_files else []
    files += {GATEWAY: [GATEWAY_FILES, AGENT_FILES], AGENTS: [AGENT_FILES]}.get(user, [])
    return [*names, *map(plan.resource_name, files)]


def script(plan: DeploymentPlan) -> str:
    """A shell script that creates the Secrets from the files of the folder in its first argument."""
    users = sorted({*(unit.name for unit in plan.units), PEOPLE, EXPORT, ADMIN}) if plan.authenticated else []
    kafka = {plan.resource_name(f"kafka-{user}"): [f"{user}.properties"] for user in users}
    files = dict(kafka)
    groups = {RELAY: plan.relay_files, GATEWAY_FILES: plan.gateway_files, AGENT_FILES: plan.agent_files}
    for name, paths in groups.items():
        if paths:
            files[plan.resource_name(name)] = list(dict.fromkeys(PurePosixPath(path).name for path in paths))
    lines = [
        "#!/bin/sh",
        "# Creates the Secrets of this run: secrets.sh FOLDER [kubectl options]",
        "# FOLDER has the files of relays and gateway (python -m infra.certificates FOLDER [HOST...]); with",
        "# authentication also each Kafka user's USER.properties.",
        'set -eu\nfolder=${1:?the folder of the files}\nshift\ncd "$folder"',
    ]
    if users:
        lines += [
            f"# Kafka users get FOLDER's {KAFKA_CA} if there is one: ssl.truststore.location={SECRETS}/{KAFKA_CA}",
            f"ca=\nif [ -f {KAFKA_CA} ]; then ca=--from-file={KAFKA_CA}; fi",
        ]
    for name, wanted in files.items():
        words = ["kubectl", "create", "secret", "generic", name, "--namespace", plan.deploy.namespace]
        authority = " $ca" if name in kafka else ""
        lines.append(shlex.join([*words, *(f"--from-file={file}" for file in wanted)]) + f'{authority} "$@"')
    return "\n".join(lines) + "\n"
