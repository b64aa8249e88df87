"""The commit note: the state that a restart needs, written to the compacted topic `restore` in the same transaction.

The topic keeps the last note of every group forever, so a start depends neither on the retention of group offsets
(seven days by default) nor on the age of the run. Group offsets are committed only for Kafka's tools.

Other shards write to the same partition, and a dead one may have left a transaction open there, which would block a
read_committed reader. So the partition is read to its end, open transactions included. The markers of the group's own
transactions, all complete once its producer has been initialised, decide which notes are committed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kafka import KafkaConsumer, TopicPartition
from kafka.errors import KafkaTimeoutError, UnknownTopicOrPartitionError

from infra.kafka.client_patches import request_metadata_every
from infra.kafka.properties import ClientProperties
from infra.kafka.record_batches import Marker, RecordBatch, known_partitions, poll_batches_and_markers
from infra.kafka.session_config import Partition
from schemas.codec import Headers, decode, reject_old_release

MAX_NOTE_BYTES = 4 * 1024 * 1024
MAX_STARTS_APART = 10_000
"""Consecutive starts of a shard whose notes may be missing between two of them: compaction removes older notes."""

log = logging.getLogger(__name__)


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

    def reached(self) -> dict[str, int]:
        """The offsets, by partition, up to which it says that logs have been written."""
        places = self.offsets.keys() | self.written.keys()
        return {place: max(self.offsets.get(place, 0), self.written.get(place, -1) + 1) for place in places}

    def follows(self, before: Note) -> bool:
        """Whether it can be a later note of the group than `before`; a new layout repeats start and commit."""
        return (before.start, before.commit) <= (self.start, self.commit) and (
            self.start <= before.start + MAX_STARTS_APART
        )

    @classmethod
    def decode(cls, text: str) -> Note:
        """The note encoded as `text`. Raises ValueError if it is not a note."""
        try:
            note = cls(*json.loads(text))
            if not (isinstance(note.start, int) and isinstance(note.commit, int) and min(note.start, note.commit) >= 0):
                raise ValueError("its start and commit must be whole numbers")
            if not all(isinstance(each, dict) for each in (note.ledger, note.state, note.offsets, note.written)):
                raise ValueError("its offsets and state must be objects")
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{text[:100]!r} is not a note: {error}") from error
        return note


class NoteUndecided(KafkaTimeoutError):
    """The transaction of a group's last note has no marker yet."""


def name_of(place: tuple[str, int]) -> str:
    """The "topic:partition" by which notes call `place`."""
    return f"{place[0]}:{place[1]}"


def place_of(name: str) -> Partition:
    """The partition that notes call `name`."""
    topic, _, partition = name.rpartition(":")
    return Partition(topic, int(partition))


POLL_MS = 100
METADATA_MS = 5
"""Least time between two requests of metadata of a client that is soon closed: kafka-python waits 100 ms, also after a
successful one for other topics."""
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
    request_metadata_every(consumer, METADATA_MS)
    return consumer


def last_note(
    observer: KafkaConsumer,
    place: TopicPartition,
    group: str,
    begin: int | None = None,
    accept: Callable[[Note], None] = lambda note: None,
) -> Note | None:
    """The note of the last commit of `group`; None if there is none at or after offset `begin`.

    `accept` gets those before it, too; compaction has removed some. Records of other programs do not count: those
    without a transaction, and notes that do not follow the one before.

    Raises NoteUndecided if the group's last transaction is still open, KafkaTimeoutError if the partition cannot be
    read to its end; OldRelease if a note of any group was written by release 0.1.0; ValueError for a record that is no
    note.
    """
    notes, undecided = _committed_notes(observer, place, lambda key: key == group, begin, accept)
    if undecided:
        raise NoteUndecided(
            f"the last transaction of {group} is neither committed nor aborted in {place.topic}; "
            f"`laminar topics transactions list` shows open transactions"
        )
    return notes.get(group)


def last_notes(
    observer: KafkaConsumer, place: TopicPartition, prefix: str, *, undecided: bool = False
) -> dict[str, Note]:
    """The notes of the last commits of all groups with `prefix`, by group; `undecided` ones count only if it is set.

    Raises as `last_note`.
    """
    notes, still_open = _committed_notes(observer, place, lambda key: key.startswith(prefix), None)
    for record in still_open if undecided else ():
        _accept(notes, record)
    return notes


def notes_in(batches: Iterable[RecordBatch], topic: str) -> dict[str, Note]:
    """The last note of each group in committed `batches` of `topic`. Raises ValueError for a damaged note."""
    last: dict[str, Note] = {}
    for batch in batches:
        for record in _note_records(batch, topic):
            _accept(last, record)
    return last


def _committed_notes(
    observer: KafkaConsumer,
    place: TopicPartition,
    is_wanted: Callable[[str], bool],
    begin: int | None,
    accept: Callable[[Note], None] = lambda note: None,
) -> tuple[dict[str, Note], list[_NoteRecord]]:
    """The last committed notes by group, and further ones of transactions that are undecided; `accept` gets all."""
    last: dict[str, Note] = {}
    undecided: dict[int, list[_NoteRecord]] = {}
    for found in read_to_end(observer, place, begin):
        if isinstance(found, Marker):
            ended = undecided.pop(found.producer_id, [])
            for record in ended if found.committed else ():
                _accept(last, record)
                accept(last[record.group])
        elif found.transactional:
            for headers in set(found.headers):
                reject_old_release(headers)
            if wanted := [each for each in _note_records(found, place.topic) if is_wanted(each.group)]:
                undecided.setdefault(found.producer_id, []).extend(wanted)
    return last, [record for records in undecided.values() for record in records]


class _NoteRecord(NamedTuple):
    group: str
    value: bytes
    headers: Headers
    where: str


def _note_records(batch: RecordBatch, topic: str) -> Iterator[_NoteRecord]:
    """The notes in a batch; none in one that was written without a transaction, because shards write in transactions.

    Such a batch is of another program. An empty record is no note: a start aborts one, whose marker may come later.
    """
    if batch.transactional:
        for offset, key, value, headers in zip(batch.offsets, batch.keys, batch.values, batch.headers, strict=True):
            if value:
                where = f"offset {offset} of partition {batch.partition} of {topic}"
                yield _NoteRecord((key or b"").decode(errors="replace"), value, headers, where)


def _accept(last: dict[str, Note], record: _NoteRecord) -> None:
    """Add a committed note to the last ones, unless it cannot follow that of its group. Raises ValueError."""
    try:
        note = Note.decode(decode(record.value, record.headers)[0].note)
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"{record.where} holds no commit note: {error}. Another program wrote it in a transaction: let Kafka's "
            f"ACLs allow only the roles to write to this topic"
        ) from error
    before = last.get(record.group)
    if before is None or note.follows(before):
        last[record.group] = note
        return
    log.warning(
        "the note of %s at %s is ignored, it is of another program: start %d, commit %d does not follow start %d, "
        "commit %d",
        *(record.group, record.where, note.start, note.commit, before.start, before.commit),
    )


def read_to_end(observer: KafkaConsumer, place: TopicPartition, begin: int | None) -> Iterator[Any]:
    """The batches and markers of a partition, to its present end."""
    if place.partition not in known_partitions(observer, place.topic):
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
