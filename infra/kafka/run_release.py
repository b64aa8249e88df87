"""The release of a run, on its topic `schemas`: that of its oldest roles, whose records all others can read, too."""

from __future__ import annotations

from infra.kafka.producer import BoundedProducer
from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import UnknownTopic
from infra.kafka.topic_reader import StoredRecord, read_rows, read_topic
from schemas.codec import encode
from schemas.records import RunRelease
from schemas.release import NEWEST, RELEASE, is_release, write_for
from schemas.topics import RESTORE, RUN_RELEASE, SCHEMAS

NOTE_HEADER = "laminar-release", RELEASE.encode()
"""The header of commit notes that says which release a role has; 0.2.0 wrote none."""
DELIVER_S = 60.0


def read_release(client: ClientProperties, run: str) -> str | None:
    """The release of `run`; None if none is recorded, as before 0.3.0."""
    try:
        found = [row.release for row in read_rows(client, SCHEMAS.name(run), RunRelease) if is_release(row.release)]
    except UnknownTopic:
        return None
    return found[-1] if found else None


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
    return next((value.decode(errors="replace")[:40] for name, value in note.headers if name == NOTE_HEADER[0]), "")
