"""The release of a run, on its topic `schemas`: that of its oldest roles, whose records all others can read, too."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import NamedTuple

from infra.kafka.producer import BoundedProducer
from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import UnknownTopic
from infra.kafka.topic_reader import StoredRecord, read_rows, read_topic
from schemas.codec import encode
from schemas.records import RunRelease
from schemas.release import NEWEST, RELEASE, is_release, release_numbers, write_for
from schemas.topics import RESTORE, RUN_RELEASE, SCHEMAS

NOTE_HEADER = "laminar-release", RELEASE.encode()
"""The header of commit notes that says which release a role has; 0.2.0 wrote none."""
DELIVER_S = 60.0

log = logging.getLogger(__name__)


class Recorded(NamedTuple):
    """The release of a run, None if there is none, as before 0.3.0; `ignored` are newer ones that do not count."""

    release: str | None
    ignored: Collection[str]


def recorded(client: ClientProperties, run: str) -> Recorded:
    """Read the recorded release of `run`.

    One newer than this release counts once a role of it has committed: only then may its records be there. Any program
    that may write to the topic could else keep all roles from starting.
    """
    topic = SCHEMAS.name(run)
    try:
        found = [row.release for row in read_rows(client, topic, RunRelease) if is_release(row.release)]
    except UnknownTopic:
        return Recorded(None, ())
    newer = {each for each in found if release_numbers(each) > release_numbers(NEWEST)}
    committed = _newest_committed(client, run) if newer else ()
    ignored = sorted(each for each in newer if release_numbers(each) > committed)
    for each in ignored:
        log.warning("release %s in %s is ignored: no role of it has committed in this run", each, topic)
    counted = [each for each in found if each not in ignored]
    return Recorded(counted[-1] if counted else None, ignored)


def read_release(client: ClientProperties, run: str) -> str | None:
    """The release of `run`, see `recorded`."""
    return recorded(client, run).release


def _newest_committed(client: ClientProperties, run: str) -> tuple[int, ...]:
    """The newest release of which a role has committed, in numbers; () if there is none."""
    try:
        notes = last_notes(client, run).values()
    except UnknownTopic:
        return ()
    return max((release_numbers(each) for each in map(release_of, notes) if is_release(each)), default=())


def record_release(client: ClientProperties, run: str, release: str) -> None:
    """Make `release` that of `run`. Raises DeliveryFailed."""
    value, headers = encode(RunRelease(release))
    with BoundedProducer(client) as producer:
        producer.send(SCHEMAS.name(run), value, key=RUN_RELEASE.encode(), headers=headers, partition=0)
        producer.flush(DELIVER_S)


def use_release(client: ClientProperties, run: str) -> None:
    """Write what the roles of `run` can read from now on in this process. Raises NewerRelease."""
    write_for(read_release(client, run) or NEWEST)


def last_notes(client: ClientProperties, run: str) -> dict[str, StoredRecord]:
    """The record of the last commit note of each role of `run`, by its consumer group."""
    notes = read_topic(client, RESTORE.name(run), decoder=lambda value, headers: ())
    return {(record.key or b"").decode(errors="replace"): record for record in notes if record.transactional}


def release_of(note: StoredRecord) -> str:
    """The release that wrote `note`; "" for 0.2.0."""
    named = (value.decode(errors="replace")[:40] for name, value in note.headers if name == NOTE_HEADER[0])
    return next(named, "").partition(".dev")[0]
