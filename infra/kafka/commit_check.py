"""Compares a session's last commit with the log while it runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from kafka import TopicPartition

from infra.kafka.aborted_outputs import check_outputs
from infra.kafka.clients import SessionClients
from infra.kafka.log_gaps import check_written
from infra.kafka.note import Note, NoteUndecided, last_note, place_of
from infra.kafka.present_leaders import read_bounds
from infra.kafka.session_config import SessionConfig

VERIFY_COMMITS = 1000
"""After this many commits the shard reads its own note back and compares it with its last commit."""


class UnexpectedNote(NamedTuple):
    """`note`, or None, is the last in the log, where another one was committed."""

    note: Note | None
    reason: str


class CommitCheck:
    """Reads the last note of the shard of `config` back, every VERIFY_COMMITS commits."""

    def __init__(self, config: SessionConfig, clients: SessionClients) -> None:
        self._config, self._clients = config, clients
        self._checked = 0
        self._undecided: tuple[int | None, float] = (None, 0.0)
        """The offset of the note that was not decided yet, and the time of the first check that found it so."""

    def due(self, commits: int) -> bool:
        """Whether to check after this number of commits."""
        return commits - self._checked >= VERIFY_COMMITS

    def run(
        self,
        observer: Any,
        another: Callable[[], AbstractContextManager[Any]],
        start: int,
        commits: int,
        noted: int,
        note_at: int | None,
    ) -> UnexpectedNote | None:
        """Check the note of the session `start` and its commit `noted`, at offset `note_at`, and the outputs in it.

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
            return None
        self._checked = commits
        if note is None or (note.start, note.commit) != (start, noted):
            found = "no note" if note is None else f"the note of start {note.start}, commit {note.commit}"
            where = f"where start {start}, commit {noted} was committed"
            return UnexpectedNote(note, f"{found} is the last in {config.restore.topic}, {where}")
        places = {TopicPartition(*place_of(name)): offset for name, offset in note.written.items()}
        ends = read_bounds(observer, another, self._clients, list(places), note.reached()).ends
        check_written(config.group, places, ends)
        check_outputs(observer, config.group, note.written)
        return None
