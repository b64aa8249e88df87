"""The last note of a group, read from the compacted topic `restore`.

Other shards write to the same partition, and a dead one may have left a transaction open there, which would block a
read_committed reader. So the partition is read to its end, open transactions included. The markers of the group's own
transactions, all complete once its producer has been initialised, decide which notes are committed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kafka import KafkaConsumer, TopicPartition
from kafka.errors import KafkaTimeoutError, UnknownTopicOrPartitionError

from infra.kafka.note import Note
from infra.kafka.properties import ClientProperties
from infra.kafka.record_batches import Marker, poll_batches_and_markers
from schemas.codec import decode, reject_old_release

POLL_MS = 100
MAX_IDLE_POLLS = 300
"""Maximum consecutive empty polls before the end."""


def uncommitted_consumer(client: ClientProperties) -> KafkaConsumer:
    """A consumer without a group that reads the whole log by batches, open transactions included."""
    consumer = KafkaConsumer(
        **client.consumer(
            group_id=None,
            enable_auto_commit=False,
            isolation_level="read_uncommitted",
            auto_offset_reset="none",
            metrics_enabled=False,
            fetch_max_wait_ms=POLL_MS,
        )
    )
    poll_batches_and_markers(consumer)
    return consumer


def last_note(observer: KafkaConsumer, place: TopicPartition, group: str, begin: int | None = None) -> Note | None:
    """The note of the last commit of `group`; None if there is none at or after offset `begin`.

    Raises KafkaTimeoutError if the group's last transaction is still open, or the partition cannot be read to its end;
    OldRelease if a note of any group was written by release 0.1.0.
    """
    key, last = group.encode(), None
    undecided: dict[int, tuple[bytes, Any]] = {}
    for found in read_to_end(observer, place, begin):
        if isinstance(found, Marker):
            ended = undecided.pop(found.producer_id, None)
            last = ended if ended is not None and found.committed else last
            continue
        for headers in set(found.headers):
            reject_old_release(headers)
        for each, value, headers in zip(found.keys, found.values, found.headers, strict=True):
            if each == key and value is not None:
                undecided[found.producer_id] = value, headers
    if undecided:
        raise KafkaTimeoutError(
            f"the last transaction of {group} is neither committed nor aborted in {place.topic}; "
            f"`laminar topics transactions list` shows open transactions"
        )
    return None if last is None else Note.decode(decode(*last)[0].note)


def read_to_end(observer: KafkaConsumer, place: TopicPartition, begin: int | None) -> Iterator[Any]:
    """The batches and markers of a partition, to its present end."""
    if place.partition not in (observer.partitions_for_topic(place.topic) or ()):
        raise UnknownTopicOrPartitionError(f"there is no topic {place.topic}, which has the commit notes of a run")
    end = observer.end_offsets([place])[place]
    first = observer.beginning_offsets([place])[place]
    observer.assign([place])
    observer.seek(place, first if begin is None else max(first, begin))
    idle = 0
    while observer.position(place) < end:
        polled = observer.poll(timeout_ms=POLL_MS).get(place, ())
        idle = 0 if polled else idle + 1
        if idle > MAX_IDLE_POLLS:
            raise KafkaTimeoutError(f"{place.topic} cannot be read to its end, offset {end}")
        for record in polled:
            yield record.value
