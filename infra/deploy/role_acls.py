"""The ACLs of each role on a run's Kafka: its topics in the catalogue, and its own group and transactional.id."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from infra.kafka.acls import CLUSTER_NAME, Acl
from schemas.topics import (
    CATALOGUE,
    CONTROL,
    EXPERIENCES,
    INBOX,
    RELAY,
    REPLICAS,
    RESTORE,
    RUN_FILES,
    SCHEMAS,
    group_name,
    run_prefix,
)

EVERYBODY = "every pipeline"
PEOPLE = "people"
"""Users who inspect a run: they read everything, may request a replica to drain, pause the run and end its upgrade."""
EXPORT = "export"
"""Exports read everything and write the notes of their own commits; the offsets of their group are for display."""
IMPORT = "import"
"""The role of imports, which are no pipeline of the run."""
FENCED_ROLES = {"placement": "rollout"}
"""Roles that may fence another role's transactional.id."""
ENDS_RUN = "prompts"
"""The role that draws the last question of a run, and ends it once nothing is left to train: it observes all roles."""
OBSERVED = (RELAY, REPLICAS, EXPERIENCES)
"""What it reads for this, beside its own topics."""
JOINING = ("rollout", "relay")
"""The roles that may join a run by Kafka's address alone, and read its settings there."""


def role_acls(run: str, roles: Iterable[str]) -> list[Acl]:
    """The ACLs of run `run` for a user per role in `roles`, for people and for exports; sorted."""
    acls = {acl for role in roles for acl in _role_acls(run, role)}
    for user in (PEOPLE, EXPORT):
        acls.add(Acl(user, "topic", run_prefix(run), True, ("Read", "Describe", "DescribeConfigs")))
        acls.add(Acl(user, "group", run_prefix(run), True, ("Describe",)))
    for topic in (INBOX, CONTROL, SCHEMAS):
        acls.add(Acl(PEOPLE, "topic", topic.name(run), False, ("Write", "Describe")))
    acls.add(_settings_of_brokers(PEOPLE))
    acls.add(Acl(EXPORT, "topic", RESTORE.name(run), False, ("Write",)))
    acls |= set(_own_group_and_id(run, EXPORT, prefix=group_name(run, f"{EXPORT}-").removesuffix(".0")))
    return sorted(acls)


def _role_acls(run: str, role: str) -> Iterator[Acl]:
    checks = () if role == IMPORT else ("DescribeConfigs",)
    yield Acl(role, "topic", run_prefix(run), True, ("Describe", *checks))
    if checks:  # before any work it checks the settings of the topics and of the brokers
        yield _settings_of_brokers(role)
    for topic in CATALOGUE.values():
        if {role, EVERYBODY} & set(topic.producers):  # at a start a role reads back what it wrote
            yield Acl(role, "topic", topic.name(run), False, ("Read", "Write"))
        elif role in topic.consumers or (topic == RUN_FILES and role in JOINING):
            yield Acl(role, "topic", topic.name(run), False, ("Read",))
    yield from _own_group_and_id(run, role, prefix=group_name(run, role).removesuffix("0"))
    if role in FENCED_ROLES:
        yield Acl(
            role, "transactional-id", group_name(run, FENCED_ROLES[role]).removesuffix("0"), True, ("Write", "Describe")
        )
    if role == ENDS_RUN:
        yield Acl(role, "group", run_prefix(run), True, ("Describe",))
        yield from (Acl(role, "topic", topic.name(run), False, ("Read",)) for topic in OBSERVED)


def _settings_of_brokers(user: str) -> Acl:
    return Acl(user, "cluster", CLUSTER_NAME, False, ("DescribeConfigs",))


def _own_group_and_id(run: str, role: str, prefix: str) -> Iterator[Acl]:
    yield Acl(role, "group", prefix, True, ("Read",))
    yield Acl(role, "transactional-id", prefix, True, ("Write", "Describe"))
