"""The commit note: the state that a restart needs, written to the compacted topic `restore` in the same transaction.

The topic keeps the last note of every group forever, so a start depends neither on the retention of group offsets
(seven days by default) nor on the age of the run. Group offsets are committed only for Kafka's tools.

Other shards write to the same partition, and a dead one may have left a transaction open there, which would block a
read_committed reader. So the partition is read to its end, open transactions included. The markers of the group's own
transactions, all complete once its producer has been initialised, decide which notes are committed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kafka import KafkaConsumer, TopicPartition
from kafka.errors import KafkaTimeoutError, UnknownTopicOrPartitionError

from infra.kafka.properties import ClientProperties
from infra.kafka.record_batches import Marker, poll_batches_and_markers
from infra.kafka.session_config import Partition
from schemas.codec import decode, reject_old_release

MAX_NOTE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Note:
    """The state of a shard as of one commit. Offsets are by "topic:partition".

    `ledger` is the first offset of the ledger in each output, `state` the operator's saved state. `offsets` are the
    next offsets of the committed inputs; `commit` counts the commits of the start; `written` are the last offsets of
    its outputs in each partition, which the log must still contain at the next start. `shards` is the number of shards
    that the role had; a `sealed` note is the last of its shard in that layout, see `resharding`.
    """

    start: int = 0
    ledger: Mapping[str, int] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    offsets: Mapping[str, int] = field(default_factory=dict)
    commit: int = 0
    written: Mapping[str, int] = field(default_factory=dict)
    shards: int = 1
    sealed: bool = False

    def encode(self) -> str:
        """The note as ASCII text. Raises ValueError if it is over MAX_NOTE_BYTES."""
        fields = [self.start, self.ledger, self.state, self.offsets, self.commit, self.written]
        layout = [self.shards, self.sealed]
        text = json.dumps(fields if layout == [1, False] else [*fields, *layout], separators=(",", ":"))
        if len(text) > MAX_NOTE_BYTES:
            raise ValueError(f"a commit note of {len(text)} bytes is over {MAX_NOTE_BYTES}: give the role more shards")
        return text

    @classmethod
    def decode(cls, text: str) -> Note:
        """The note encoded as `text`. Raises ValueError if it is not a note."""
        try:
            return cls(*json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"not a commit note: {error}: {text[:100]!r}") from error


def name_of(place: tuple[str, int]) -> str:
    """The "topic:partition" by which notes call `place`."""
    return f"{place[0]}:{place[1]}"


def place_of(name: str) -> Partition:
    """The partition that notes call `name`."""
    topic, _, partition = name.rpartition(":")
    return Partition(topic, int(partition))


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
    notes, undecided = _committed_notes(observer, place, lambda key: key == group, begin)
    if undecided:
        raise KafkaTimeoutError(
            f"the last transaction of {group} is neither committed nor aborted in {place.topic}; "
            f"`laminar topics transactions list` shows open transactions"
        )
    return notes.get(group)


def last_notes(observer: KafkaConsumer, place: TopicPartition, prefix: str) -> dict[str, Note]:
    """The notes of the last commits of all groups with `prefix`, by group; what is undecided does not count.

    Raises as `last_note`.
    """
    return _committed_notes(observer, place, lambda key: key.startswith(prefix), None)[0]


def _committed_notes(
    observer: KafkaConsumer, place: TopicPartition, is_wanted: Callable[[str], bool], begin: int | None
) -> tuple[dict[str, Note], bool]:
    """The last committed notes by group, and whether a transaction with further ones is undecided."""
    last: dict[str, tuple[bytes, Any]] = {}
    undecided: dict[int, dict[str, tuple[bytes, Any]]] = {}
    for found in read_to_end(observer, place, begin):
        if isinstance(found, Marker):
            ended = undecided.pop(found.producer_id, {})
            last |= ended if found.committed else {}
            continue
        for headers in set(found.headers):
            reject_old_release(headers)
        for each, value, headers in zip(found.keys, found.values, found.headers, strict=True):
            if value is not None and is_wanted(key := (each or b"").decode(errors="replace")):
                undecided.setdefault(found.producer_id, {})[key] = value, headers
    return {group: Note.decode(decode(*found)[0].note) for group, found in last.items()}, bool(undecided)


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
