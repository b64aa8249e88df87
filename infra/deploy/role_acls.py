"""What each role may do on a run's Kafka: what the catalogue says that it reads and writes, and its own groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from infra.kafka.acls import Acl
from schemas.topics import CATALOGUE, INBOX, group_name, run_prefix

EVERYBODY = "every pipeline"
PEOPLE = "people"
"""Look at everything, and ask a replica to drain."""
EXPORT = "export"
"""Reads everything; its group's offsets are for display."""
FENCES = {"placement": "rollout"}
"""Who may end the transactions of whom, and so its life."""
WATCHES = {"prompts": "placement"}
"""Who looks at whose offsets."""


def role_acls(run: str, roles: Iterable[str]) -> list[Acl]:
    """The ACLs of the users of run `run`, one named as each of `roles`, of people and of exports; sorted."""
    acls = {acl for role in roles for acl in _of_role(run, role)}
    for user in (PEOPLE, EXPORT):
        acls.add(Acl(user, "topic", run_prefix(run), True, ("Read", "Describe", "DescribeConfigs")))
        acls.add(Acl(user, "group", run_prefix(run), True, ("Describe",)))
    acls.add(Acl(PEOPLE, "topic", INBOX.name(run), False, ("Write", "Describe")))
    acls |= set(_own(run, EXPORT, prefix=group_name(run, f"{EXPORT}-").removesuffix(".0")))
    return sorted(acls)


def _of_role(run: str, role: str) -> Iterator[Acl]:
    yield Acl(role, "topic", run_prefix(run), True, ("Describe",))
    for topic in CATALOGUE.values():
        if {role, EVERYBODY} & set(topic.producers):  # what it has written it reads back at a start
            yield Acl(role, "topic", topic.name(run), False, ("Read", "Write"))
        elif role in topic.consumers:
            yield Acl(role, "topic", topic.name(run), False, ("Read",))
    yield from _own(run, role, prefix=group_name(run, role).removesuffix("0"))
    if role in FENCES:
        yield Acl(
            role, "transactional-id", group_name(run, FENCES[role]).removesuffix("0"), True, ("Write", "Describe")
        )
    if role in WATCHES:
        yield Acl(role, "group", group_name(run, WATCHES[role]).removesuffix("0"), True, ("Describe",))


def _own(run: str, role: str, prefix: str) -> Iterator[Acl]:
    yield Acl(role, "group", prefix, True, ("Read",))
    yield Acl(role, "transactional-id", prefix, True, ("Write", "Describe"))
