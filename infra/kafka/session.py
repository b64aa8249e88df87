"""A session is one start of one shard of a pipeline: its inputs, its last commit and its transactions.

There is one consumer and one transactional producer of a shard per process, held here: Beam keeps several instances of
a DoFn, and two producers with one transactional.id would fence each other. Opening a session is the complete restart
protocol (invariant 5): fence the predecessor, read its last note with the offsets, read the ledger of outputs back,
commit the next start number. An open transaction of the predecessor is aborted, and it can no longer commit.

A transaction writes outputs, then the note. After any interruption a note never covers more than its outputs, and a
start relies on the note alone. A shard whose start does not continue from its inputs may leave the note out for a
while: that saves a round trip. The group's offsets are for Kafka's tools: they cost a third of a transaction, so only
one transaction a second has them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kafka import TopicPartition
from kafka.consumer.fetcher import ConsumerRecord
from kafka.errors import (
    InvalidProducerEpochError,
    KafkaError,
    KafkaTimeoutError,
    OffsetOutOfRangeError,
    ProducerFencedError,
)

from infra.kafka.aborted_outputs import check_outputs
from infra.kafka.client_patches import position_in
from infra.kafka.clients import KafkaClients, SessionClients
from infra.kafka.commit_check import CommitCheck, WrittenOffsets
from infra.kafka.commit_progress import CommitProgress
from infra.kafka.group_progress import GroupProgress
from infra.kafka.input_positions import input_of_each, seek_inputs
from infra.kafka.ledger_reader import read_committed
from infra.kafka.log_gaps import check_position, check_topics, check_written, log_truncated, note_missing, traces_of
from infra.kafka.note import Note, last_note, name_of, place_of
from infra.kafka.owner_check import OwnerCheck
from infra.kafka.present_leaders import check_present, read_bounds, write_aborted
from infra.kafka.run_release import NOTE_HEADER
from infra.kafka.session_config import Offsets, Partition, SessionConfig
from infra.kafka.shard_layout import check_layout
from schemas.codec import encode
from schemas.records import CommitNote

ANSWER_MS = 10_000
"""Time-out of one request to Kafka. Without it kafka-python waits forever after a broken connection."""
CATCH_UP_S = 30.0
"""How long reading the ledger back may make no progress, in addition to the transaction time-out."""


class Outgoing(NamedTuple):
    """An encoded record to send."""

    topic: str
    partition: int | None
    key: bytes | None
    value: bytes
    headers: Sequence[tuple[str, bytes]]


_FENCED = (
    "superseded by a newer process of this shard, fenced by placement, or aborted after kafka.transaction_timeout_s: "
)


class SessionLost(RuntimeError):
    """The outcome of a commit is unknown, or Kafka ended the session: open a new one, never send again."""


class Fenced(SessionLost):
    """A successor owns this shard: this process must end."""


class Session:
    """An open session: one thread polls, one may commit.

    Raises SessionLost if Kafka is unavailable, LogTruncated if records that the shard still needs are gone, NoteMissing
    if only its note is gone, OutputAborted if outputs of its last note were aborted, OtherLayout if the role had other
    shards, OldRelease if the topics are of release 0.1.0.
    `start` rises by one with every session of a group, in any process.
    """

    start: int
    """The number of this start."""
    note: Note
    """The note of the last commit before this start."""
    ledger: list[ConsumerRecord]
    """The records in its ledger partitions, from the offsets in the note on."""
    ledger_ends: dict[str, int]
    """The end of each ledger partition, "topic:partition", at this start."""
    ends: dict[Partition, int]
    """The end of each input at this start, open transactions included."""

    def __init__(self, config: SessionConfig, clients: SessionClients | None = None) -> None:
        self.config = config
        self._clients = clients or KafkaClients(config.client)
        self.lost: SessionLost | None = None
        self.commits = self.noted = 0
        """All commits; the last one with a note."""
        self._written: dict[str, int] = {}
        self._committing = self._clients.lock()
        self._offsets: dict[str, int] = {}
        self._begins: dict[Partition, int] = {}
        self._group, self.progress = GroupProgress(), CommitProgress()
        self._note_at: int | None = None
        self._owner, self._check = OwnerCheck(config, self._clients), CommitCheck(config, self._clients)
        self._outputs = {name_of(place) for place in (config.restore, *config.ledger, *config.owned)}
        self._producer: Any = None
        self._consumer: Any = None
        self._assigned = [place for place, _ in input_of_each(config)]
        try:
            self._open()
        except KafkaError as error:
            self.close()
            raise self._give_up(error) from error
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        # Check first: without a broker a client takes 30 s to fail, and leaves its sockets open.
        if (reason := self._clients.problem()) is not None:
            raise SessionLost(f"{self.config.group}: {reason}")
        self._producer = self._clients.producer(self.config.group, self.config.transaction_timeout_s)
        self._producer.init_transactions()
        self._consumer = self._clients.consumer()
        # At once for all topics: another request of metadata would wait for the pause after the last one.
        self._consumer.assign([*(TopicPartition(*p) for p in self.config.ledger), *self._assigned])
        self._restore()

    def poll(self, timeout_s: float) -> list[ConsumerRecord]:
        """The next records, in order within each partition; empty after `timeout_s` seconds.

        Raises SessionLost, Fenced, and LogTruncated if the log no longer has the next one.
        """
        if not self._assigned:
            self._clients.sleep(timeout_s)
            return []
        try:
            polled = self._consumer.poll(timeout_ms=math.ceil(timeout_s * 1000))
        except OffsetOutOfRangeError as error:
            raise self._out_of_range(error) from error
        except KafkaError as error:
            raise self._give_up(error) from error
        return [record for records in polled.values() for record in records]

    def _out_of_range(self, error: OffsetOutOfRangeError) -> Exception:
        if (note := self._last_note()) is not None and note.start > self.start:  # a trim follows the owner alone
            return self._lose(Fenced, f"start {note.start} owns it, and the log was trimmed")
        asked: dict[TopicPartition, int] = error.args[0]
        reached = {name_of(place): offset for place, offset in asked.items()}
        with self._observer() as observer:
            begins, ends = read_bounds(observer, self._observer, self._clients, list(asked), reached)
        if all(begins[place] <= offset <= ends[place] for place, offset in asked.items()):
            return self._lose(SessionLost, f"a broker that does not lead a partition any more has answered: {error!r}")
        return log_truncated(self.config.group, str(error))

    def check_inputs(self) -> None:
        """Raise SessionLost if an input's topic was deleted: it asks Kafka only if the consumer's metadata lack it."""
        try:
            check_topics(self._consumer, self._assigned)
        except KafkaError as error:
            raise self._give_up(error) from error

    def positions(self) -> dict[Partition, int]:
        """The next offset to read of every input partition. Raises SessionLost."""
        try:
            return {Partition(*tp): self._position(tp) for tp in self._assigned}
        except KafkaError as error:
            raise self._give_up(error) from error

    def _position(self, place: TopicPartition) -> int:
        """The next offset to read. Raises KafkaTimeoutError."""
        if (position := position_in(self._consumer, place, ANSWER_MS)) is None:
            raise KafkaTimeoutError(f"{self.config.group}: the position in {place} is unknown")
        return position

    def high_watermarks(self) -> dict[Partition, int | None]:
        """The high watermark of every input partition in the last response, open transactions included."""
        return {Partition(*tp): self._consumer.highwater(tp) for tp in self._assigned}

    def seek(self, offsets: Offsets) -> None:
        """Read on from `offsets` instead of the committed ones. Raises LogTruncated, also if it has lost others."""
        for partition, offset in {**self._lost_offsets, **offsets}.items():
            place = TopicPartition(*partition)
            check_position(self.config.group, place, offset, self._begins[partition], self.ends[partition])
            self._consumer.seek(place, offset)

    def commit(
        self,
        outputs: Iterable[Outgoing],
        offsets: Offsets,
        ledger: Mapping[str, int],
        state: Mapping[str, Any],
        last: bool = False,
        note_due: bool = True,
    ) -> dict[str, int]:
        """Write `outputs` and the note, with `offsets`, in one transaction; return the first offset written of each
        partition.

        Unless `note_due`, the note is left out if the last one names all partitions written. The group's offsets follow
        at most GROUP_OFFSETS_S later if there is a commit with a note then, or at once with `last`.

        Raises SessionLost if the outcome is unknown, Fenced if a successor owns the shard, ValueError if the note is
        too long.
        """
        with self._committing:
            if self.lost is not None:
                raise self.lost
            self._offsets |= {name_of(partition): offset for partition, offset in offsets.items()}
            self._group.move(offsets)
            note = Note(self.start, ledger, state, self._offsets, self.commits + 1, {}, *self.config.layout)
            note.encode()  # raises for a note that is too long, before anything is written
            sent: list[Any] = []
            self.progress.begin(outputs := list(outputs))
            try:
                if self._producer.reconnected():
                    self._clients.check_own_transactions(
                        self.config.group, self._producer.producer_id, self._output_places()
                    )
                first = self._write(outputs, note, sent, last, note_due)
            except KafkaError as error:
                raise self._give_up(error, *(f.exception for f in sent if f.is_done)) from error
            self.commits += 1
            self.progress.commit()
            return first

    def group_offsets_due(self, last: bool = False) -> bool:
        """Whether a commit now would write the group's offsets."""
        return self._group.due(self._clients.monotonic(), last)

    def _write(
        self, outputs: Sequence[Outgoing], note: Note, sent: list[Any], last: bool, note_due: bool = True
    ) -> dict[str, int]:
        """Write the transaction; `sent` collects the futures, also if it fails. Raises KafkaError."""
        config, producer = self.config, self._producer
        producer.begin([TopicPartition(*config.restore)] if note_due else [])
        for o in outputs:
            sent.append(producer.send(o.topic, o.value, o.key, list(o.headers), o.partition))
        if outputs:
            producer.flush()
        first, final = dict[str, int](), dict[str, int]()
        for future in sent:
            written = future.get(timeout=0)
            place = name_of((written.topic, written.partition))
            first.setdefault(place, written.offset)
            final[place] = written.offset
        self._check.wrote(final)
        self._outputs.update(final)
        known = final.keys() <= self._written.keys()
        self._written |= final
        if known and not note_due:
            producer.commit_transaction()
            return first
        text = replace(note, written=self._written).encode()
        value, headers = encode(CommitNote(config.group, text, self._clients.unix_ms()))
        topic, partition = config.restore
        noted = producer.send(topic, value, config.group.encode(), [*headers, NOTE_HEADER], partition)
        sent.append(noted)
        if grouped := self.group_offsets_due(last):
            producer.send_offsets_to_transaction(self._group.to_write(), config.group)
        producer.commit_transaction()
        if grouped:
            self._group.wrote(self._clients.monotonic())
        self._note_at, self.noted = noted.get(timeout=0).offset, note.commit
        self._check.wrote({name_of(config.restore): self._note_at})
        return first

    def _end_own_transactions(self, places: Collection[TopicPartition]) -> None:
        """End what earlier starts have left open, before this one writes there: its next end would decide that, too."""
        if places:
            self._clients.end_own_transactions(self.config.group, self._producer.producer_id, places)

    def _output_places(self) -> list[TopicPartition]:
        return [TopicPartition(*place_of(name)) for name in self._outputs]

    def verify(self) -> None:
        """Every VERIFY_COMMITS commits: raise SessionLost if another note than that of the last commit is the last, or
        one since the last check was aborted (a transaction ended from outside, or misjudged), Fenced if a later start's
        is the last, LogTruncated if an output is gone, OutputAborted. See `CommitCheck`.
        """
        if self.lost is not None or not self._check.due(self.commits):
            return
        with self._observer() as observer:
            found = self._check.run(observer, self._observer, self.start, self.commits, self.noted, self._note_at)
        if found is not None:
            later = found.note is not None and found.note.start > self.start
            raise self._lose(Fenced if later else SessionLost, found.reason)

    def check_owner(self) -> None:
        """Raise Fenced if a later start owns the shard; an idle session asks once in OWNER_S."""
        if (start := self._owner.successor(self.start, self.commits, self._note_at)) is not None:
            raise self._lose(Fenced, f"start {start} owns it")

    def close(self, patience_s: float = 1.0) -> None:
        """Close both connections after a commit in progress; a longer one is aborted by the successor's fence."""
        self.lost = self.lost or SessionLost(f"{self.config.group}: closed")
        if self._committing.acquire(timeout=patience_s):
            self._committing.release()
        if self._consumer is not None:
            self._consumer.close(autocommit=False, timeout_ms=1000)
        if self._producer is not None:
            with contextlib.suppress(KafkaError):  # some records were not sent
                self._producer.close(timeout=1)

    def _last_note(self) -> Note | None:
        with self._observer() as observer:
            return last_note(observer, TopicPartition(*self.config.restore), self.config.group, self._note_at)

    @contextlib.contextmanager
    def _observer(self) -> Iterator[Any]:
        try:
            observer = self._clients.observer()
            try:
                yield observer
            finally:
                observer.close(autocommit=False)
        except KafkaError as error:
            raise self._give_up(error) from error

    def _give_up(self, error: KafkaError, *others: BaseException | None) -> SessionLost:
        causes = (error, *others, self._producer.failure if self._producer is not None else None)
        fenced = any(isinstance(e, ProducerFencedError | InvalidProducerEpochError) for e in causes)
        return self._lose(Fenced if fenced else SessionLost, f"{_FENCED if fenced else ''}{error!r}")

    def _lose(self, kind: type[SessionLost], reason: str) -> SessionLost:
        self.lost = self.lost if isinstance(self.lost, Fenced) else kind(f"{self.config.group}: {reason}")
        return self.lost

    def _restore(self) -> None:
        config, consumer, assigned = self.config, self._consumer, self._assigned
        restore, ledger = TopicPartition(*config.restore), [TopicPartition(*p) for p in config.ledger]
        outputs = self._output_places()
        self._end_own_transactions(outputs)
        written = write_aborted(self._producer, config.group, [restore])
        with self._observer() as observer:
            check_present(observer.end_offsets([restore]), written)
            note = last_note(observer, restore, config.group, accept=(before := WrittenOffsets()).add_noted)
            check_layout(observer, config, note)
            if note is not None:
                self._outputs.update(note.written)
                self._end_own_transactions([place for place in self._output_places() if place not in outputs])
                written |= write_aborted(self._producer, config.group, ledger)
            places = list(dict.fromkeys([*self._output_places(), *assigned]))
            self.note = note or Note()
            begins, ends = read_bounds(observer, self._observer, self._clients, places, self.note.reached())
            check_present(ends, written)
            ends_before = {**ends, **written}
            check_written(config.group, {tp: self.note.written.get(name_of(tp), -1) for tp in places}, ends_before)
            check_outputs(observer, config.group, before.written)
            if note is None:
                committed = self._clients.committed(config.group)
                self._check_first_start(traces_of(observer, config, begins, ends, committed))
        self.start = self.note.start + 1
        self.ledger_ends = {name_of(tp): ends[tp] for tp in ledger}
        floors = {tp: self.note.ledger.get(name_of(tp), 0 if note else begins[tp]) for tp in ledger}
        for tp, floor in floors.items():
            check_position(config.group, tp, floor, begins[tp], ends_before[tp])
        consumer.assign(ledger)
        patience_s = CATCH_UP_S + config.transaction_timeout_s
        reach = {tp: ends[tp] for tp in ledger}
        check = self._check_not_own if note is None else None
        self.ledger = read_committed(
            consumer, floors, reach, self._position, self._clients.monotonic, patience_s, check, self._clients.blocking
        )
        consumer.assign(assigned)
        lost = seek_inputs(consumer, config, self.note.offsets, begins, ends)
        self._lost_offsets = lost.sought
        if lost.skipped:
            kept = {name: value for name, value in self.note.state.items() if name not in config.of_newest}
            self.note = replace(self.note, state=kept)
        positions = {**self.positions(), **lost.sought}
        self._begins = {Partition(*tp): begins[tp] for tp in assigned}
        self.ends = {Partition(*tp): ends[tp] for tp in assigned}
        # The new start number is committed like any state, so two starts never have the same number.
        offsets = {
            Partition(*tp): positions[Partition(*tp)] for tp, i in input_of_each(config) if i.start == "committed"
        }
        self.commit([], offsets, {name_of(tp): floor for tp, floor in floors.items()}, self.note.state)

    def _check_not_own(self, record: ConsumerRecord) -> None:
        """Raise NoteMissing if this shard, which has no note, has written `record` of its ledger."""
        if self.config.has_written(record.key):
            self._check_first_start([f"{name_of((record.topic, record.partition))} holds its output"])

    def _check_first_start(self, traces: Sequence[str]) -> None:
        """Raise NoteMissing if there are `traces` of earlier commits, or SessionLost if there is a note by now."""
        if not traces:
            return
        with self._observer() as observer:
            if last_note(observer, TopicPartition(*self.config.restore), self.config.group):
                raise SessionLost(f"{self.config.group}: a successor has committed while this session opened")
        raise note_missing(self.config.group, self.config.restore.topic, traces)
