"""Access control lists (ACLs) for a Kafka with authentication: as values, as commands, and created on the cluster."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from infra.kafka.admin import admin_client
from infra.kafka.properties import ClientProperties

Resource = Literal["topic", "group", "transactional-id", "cluster"]
CLUSTER_NAME = "kafka-cluster"
"""Kafka's name of the only resource of the kind `cluster`."""


@dataclass(frozen=True, order=True)
class Acl:
    """`user` may perform `operations` on the resource `name`; if `prefixed`, on all resources with that prefix."""

    user: str
    resource: Resource
    name: str
    prefixed: bool
    operations: tuple[str, ...]


def acl_command(acl: Acl, bootstrap_servers: str, command_config: str) -> str:
    """`acl` as a command of Apache Kafka's scripts."""
    words = ["kafka-acls.sh", "--bootstrap-server", bootstrap_servers]
    words += ["--command-config", command_config] if command_config else []
    words += ["--add", "--allow-principal", f"User:{acl.user}"]
    words += [word for operation in acl.operations for word in ("--operation", operation)]
    words += ["--cluster"] if acl.resource == "cluster" else [f"--{acl.resource}", acl.name]
    words += ["--resource-pattern-type", "prefixed"] if acl.prefixed else []
    return shlex.join(words)


def create_acls(client: ClientProperties, acls: Iterable[Acl]) -> int:
    """Create `acls` and return the number of entries. Idempotent. Raises RuntimeError with the first that failed."""
    from kafka.admin import ACL, ACLOperation, ACLPermissionType, ACLResourcePatternType, ResourcePattern, ResourceType

    kinds = {
        "topic": ResourceType.TOPIC,
        "group": ResourceType.GROUP,
        "transactional-id": ResourceType.TRANSACTIONAL_ID,
        "cluster": ResourceType.CLUSTER,
    }
    entries = [
        ACL(
            principal=f"User:{acl.user}",
            host="*",
            operation=ACLOperation[re.sub(r"(?<=[a-z])(?=[A-Z])", "_", operation).upper()],
            permission_type=ACLPermissionType.ALLOW,
            resource_pattern=ResourcePattern(
                kinds[acl.resource],
                acl.name,
                ACLResourcePatternType.PREFIXED if acl.prefixed else ACLResourcePatternType.LITERAL,
            ),
        )
        for acl in acls
        for operation in acl.operations
    ]
    with admin_client(client) as admin:
        done = admin.create_acls(entries)
    if done["failed"]:
        raise RuntimeError(f"an ACL could not be created: {done['failed'][0]}")
    return len(entries)
