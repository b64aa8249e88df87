"""Compares a session's commits with the log: while it runs, and at the next start.

A commit may be lost or torn although Kafka has confirmed it, and later ones succeed: an administrator may end a
transaction in one partition. So a session remembers where each commit since the last check wrote, its note included,
with or without one, and reads all their outcomes; a start reads those of the notes of the session before it. Compaction
removes older notes, and with them what a start could compare; outputs that it removes are not needed.

What no start compares are commits without a note, since the last one that has one: only the rollouts make them. The
next start is another incarnation, so placement assigns again what has no Trajectory in the log.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

from kafka import TopicPartition

from infra.kafka.aborted_outputs import output_aborted, read_outcomes
from infra.kafka.clients import SessionClients
from infra.kafka.log_gaps import check_written
from infra.kafka.note import Note, NoteUndecided, last_note, place_of
from infra.kafka.present_leaders import read_bounds
from infra.kafka.session_config import SessionConfig

VERIFY_COMMITS = 250
"""After this many commits the shard compares all of them with the log."""


class WrittenOffsets:
    """The last offset of each commit in each partition, for the last 2 * VERIFY_COMMITS of one start: a check may come
    later than it is due.
    """

    def __init__(self) -> None:
        self.start = 0
        self.written: dict[str, deque[int]] = defaultdict(partial(deque[int], maxlen=2 * VERIFY_COMMITS))
        """Ascending, by "topic:partition"."""

    def add(self, written: Mapping[str, int]) -> None:
        """Add those of the next commit; a partition to which it has not written may have the offset of an earlier."""
        for place, offset in written.items():
            known = self.written[place]
            if not known or known[-1] < offset:
                known.append(offset)

    def add_noted(self, note: Note) -> None:
        """Add those of the next note; the first one of a start replaces all before."""
        if note.start != self.start:
            self.start = note.start
            self.written.clear()
        self.add(note.written)


class UnexpectedNote(NamedTuple):
    """`note`, or None, is the last in the log, where another one was committed."""

    note: Note | None
    reason: str


class CommitCheck:
    """Compares the commits of the shard of `config` with the log, every VERIFY_COMMITS commits."""

    def __init__(self, config: SessionConfig, clients: SessionClients) -> None:
        self._config, self._clients = config, clients
        self._checked = 0
        self._unchecked = WrittenOffsets()
        self._undecided: tuple[int | None, float] = (None, 0.0)
        """The offset of the note that was not decided yet, and the time of the first check that found it so."""

    def due(self, commits: int) -> bool:
        """Whether to check after this number of commits."""
        return commits - self._checked >= VERIFY_COMMITS

    def wrote(self, written: Mapping[str, int]) -> None:
        """Record the last offsets of a commit, by "topic:partition"."""
        self._unchecked.add(written)

    def run(
        self,
        observer: Any,
        another: Callable[[], AbstractContextManager[Any]],
        start: int,
        commits: int,
        noted: int,
        note_at: int | None,
    ) -> UnexpectedNote | None:
        """Check the note of the session `start` and its commit `noted`, at offset `note_at`, and what all commits since
        the last check wrote.

        Kafka confirms a commit before it writes the markers: while the note has none, the check stays due, for as long
        as a transaction may take. Raises LogTruncated, OutputAborted and KafkaError; `another` opens an observer.
        """
        config, now = self._config, self._clients.monotonic()
        try:
            note = last_note(observer, TopicPartition(*config.restore), config.group, note_at)
        except NoteUndecided:
            if note_at != self._undecided[0]:
                self._undecided = note_at, now
            if now - self._undecided[1] > config.transaction_timeout_s:
                raise
            return self._check_outcomes(observer)
        self._checked = commits
        if note is None or (note.start, note.commit) != (start, noted):
            found = "no note" if note is None else f"the note of start {note.start}, commit {note.commit}"
            where = f"where start {start}, commit {noted} was committed"
            return UnexpectedNote(note, f"{found} is the last in {config.restore.topic}, {where}")
        places = {TopicPartition(*place_of(name)): offset for name, offset in note.written.items()}
        ends = read_bounds(observer, another, self._clients, list(places), note.reached()).ends
        check_written(config.group, places, ends)
        self._unchecked.add(note.written)
        return self._check_outcomes(observer, note)

    def _check_outcomes(self, observer: Any, note: Note | None = None) -> UnexpectedNote | None:
        """Check what is unchecked, but what has no end yet; with the last note, if that has one."""
        aborted, undecided = read_outcomes(observer, self._unchecked.written)
        for place, offset in aborted:
            if place != self._config.restore:
                raise output_aborted(self._config.group, place, offset)
        for place, offset in aborted:
            return UnexpectedNote(note, f"its note at offset {offset} of {place.topic} was aborted, but later ones not")
        self._unchecked.written.clear()
        for name, offsets in undecided.items():
            self._unchecked.written[name].extend(offsets)
        return None
