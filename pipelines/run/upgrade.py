"""Upgrades of a run's roles one by one: its release is recorded, and rises once no role of the old one is left."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from infra.kafka.properties import ClientProperties
from infra.kafka.run_release import last_notes, read_release, record_release, recorded, release_of
from pipelines.config import Config
from pipelines.inspect.audit.audit_run import committed_notes
from pipelines.inspect.present_notes import present_notes
from pipelines.roles import AGENT_PIPELINES, processes_of
from schemas.release import FIRST, NEWEST, RELEASE, NewerRelease, NotInRelease, is_release, release_numbers
from schemas.topics import RESTORE, run_prefix


@dataclass(frozen=True)
class OlderRole:
    """A role whose last commit was made by an older release."""

    name: str
    release: str
    committed_at: int
    """The time of that commit, in Unix milliseconds."""


class StillOlder(RuntimeError):
    """Roles of an older release are left: newer records would be lost on them."""

    def __init__(self, run: str, roles: Collection[OlderRole]) -> None:
        super().__init__(f"run {run} still has {len(roles)} roles of an older release than {RELEASE}")
        self.roles = tuple(roles)


def record_first_release(client: ClientProperties, run: str) -> None:
    """Record the release of a run that has none: it is new, or its roles are of a release that recorded none.

    Another program can have replaced the record, too: the oldest role of a run that has begun tells its release.
    """
    if read_release(client, run) is not None:
        return
    releases = [release_of(note) or FIRST for note in last_notes(client, run).values()]
    release, ignored = recorded(client, run)  # another start may have recorded it, maybe before it committed a note
    if release is not None or (ignored and not releases):  # a newer release begins this run, or another program wrote
        return
    record_release(client, run, min(filter(is_release, releases), key=release_numbers, default=NEWEST))


def refuse_new_role(client: ClientProperties, run: str, pipeline: str) -> None:
    """Raise NotInRelease if roles of the run's release know nothing of `pipeline`: they could not read its records."""
    if pipeline in AGENT_PIPELINES and (release := read_release(client, run)) == FIRST:
        raise NotInRelease(f"role {pipeline}", release)


def older_roles(client: ClientProperties, run: str) -> list[OlderRole]:
    """The roles of `run` whose last commit was made by an older release, by name."""
    found, present = [], present_notes(committed_notes(client, RESTORE.name(run)))
    for group, note in sorted(last_notes(client, run).items()):
        if group in present and (release := release_of(note)) != NEWEST:
            name = group.removeprefix(run_prefix(run))
            found.append(OlderRole(name, release or FIRST, note.timestamp))
    return found


def upgrade_resumed(config: Config, note: Callable[[str], None]) -> None:
    """Make this release that of a run whose roles on this machine are about to start.

    Roles elsewhere may be older: `note` then receives what to do.
    """
    here = [f"{role.pipeline}.{role.index}" for process in processes_of(config) for role in process.roles]
    try:
        upgrade(config.kafka.client(), config.run.name, here)
    except StillOlder as older:
        names = ", ".join(role.name for role in older.roles)
        note(f"{names}: of an older release, on other machines; once they have {RELEASE}: laminar runs upgrade")


def upgrade(client: ClientProperties, run: str, ended: Collection[str] = ()) -> None:
    """Make this release that of `run`; roles in `ended` count as gone. Raises StillOlder, and NewerRelease."""
    before = read_release(client, run)
    if before is not None and release_numbers(before) > release_numbers(NEWEST):
        raise NewerRelease(f"run {run} has been upgraded to release {before} already, and this is {RELEASE}")
    if left := [role for role in older_roles(client, run) if role.name not in ended]:
        raise StillOlder(run, left)
    if before != NEWEST:
        record_release(client, run, NEWEST)
