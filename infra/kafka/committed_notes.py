"""The last committed notes of a run, for commands that must know what a restart needs."""

from __future__ import annotations

from infra.kafka.note import Note
from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import UnknownTopic
from infra.kafka.topic_reader import read_topic
from schemas.records import CommitNote


def committed_notes(client: ClientProperties, restore: str) -> dict[str, Note]:
    """The note of the last commit of each group, by group, from the topic `restore`; empty where there is none.

    Records after an open transaction are not visible, so a note may be older than the last one. This is safe: the
    offsets that a restart needs only rise.
    """
    try:
        return {
            row.group: Note.decode(row.note)
            for record in read_topic(client, restore)
            for row in record.rows
            if isinstance(row, CommitNote)
        }
    except UnknownTopic:
        return {}
