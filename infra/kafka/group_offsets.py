"""Sets the offsets at which a shard resumes, in a transaction that fences the shard's running process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace

from kafka import OffsetAndMetadata, TopicPartition

from infra.clocks import wall_ms
from infra.kafka import run_release
from infra.kafka.log_gaps import note_missing
from infra.kafka.note import last_note, last_notes, name_of, uncommitted_consumer
from infra.kafka.properties import ClientProperties
from infra.kafka.session_config import Partition
from infra.kafka.transactions import TransactionalProducer
from schemas.codec import Headers, encode
from schemas.records import CommitNote
from schemas.topics import run_of

TIMEOUT_S = 10.0
"""How long the transaction may take, at most."""


def set_group_offsets(
    client: ClientProperties,
    group: str,
    topic: str,
    offsets: Mapping[int, int],
    restore: Partition,
    transaction_timeout_s: float,
) -> None:
    """Let `group` resume `topic` at `offsets`, by partition, at its next start; the rest of its note is unchanged.

    The transactional.id of a shard is the name of its group: a running process of the group can no longer commit, and
    must be restarted unless it restarts by itself. The transaction takes at most `transaction_timeout_s` seconds.

    Raises KafkaError, and NoteMissing for a group without a note: an empty one would make the next start assign all
    numbers again. Nothing has changed then.
    """
    place = TopicPartition(*restore)
    with closing(uncommitted_consumer(client)) as observer:
        is_known = group in last_notes(observer, place, group)
    if not is_known:
        traces = [f"its group has a committed offset in {topic}:{number}" for number in offsets]
        raise note_missing(group, restore.topic, traces)
    timeout_ms = int(min(TIMEOUT_S, transaction_timeout_s) * 1000)
    producer = TransactionalProducer(**client.producer(transactional_id=group, transaction_timeout_ms=timeout_ms))
    try:
        producer.init_transactions()
        with closing(uncommitted_consumer(client)) as observer:  # the predecessor commits nothing more
            note = last_note(observer, place, group)
        assert note is not None
        release = _release_of(client, group, restore.topic)
        named = {name_of((topic, number)): offset for number, offset in offsets.items()}
        moved = replace(note, offsets={**note.offsets, **named}, commit=note.commit + 1, written={})
        value, headers = encode(CommitNote(group, moved.encode(), wall_ms()))
        producer.begin([place])
        producer.send(restore.topic, value, group.encode(), [*headers, *release], restore.partition)
        committed = {TopicPartition(topic, number): OffsetAndMetadata(to, "", -1) for number, to in offsets.items()}
        producer.send_offsets_to_transaction(committed, group)
        producer.commit_transaction()
    finally:
        producer.close(timeout=1)


def _release_of(client: ClientProperties, group: str, restore: str) -> Headers:
    """The header of the last note of `group` with the release of its role, which may be another one than this."""
    run = run_of(restore)
    last = run_release.last_notes(client, run).get(group) if run is not None else None
    return () if last is None else tuple(each for each in last.headers if each[0] == run_release.NOTE_HEADER[0])
