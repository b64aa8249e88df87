"""Tells a batch that the log has lost from one that the buffer has not made yet."""

from __future__ import annotations

import logging

from infra.kafka.note import Note
from infra.kafka.role_notes import NotesUnavailable, ReadNotes
from infra.kafka.shard_layout import layout_of
from operators.trainer.assembly import BatchAssembly

log = logging.getLogger(__name__)


READ_S = 5.0
"""A read of the notes opens a consumer."""


class MissingBatchWatch:
    """Watches for a gap in the batches of `assembly`: a later batch in the log without the next one.

    Another writer than the buffer may have written the later one, with any number. So the next one is missing only if
    the buffer has made it, by its own commit notes, and it has not arrived `wait_s` seconds after `notes` said so: a
    batch and its note become visible at different times. `notes` is read when a gap is seen, then every `wait_s`, but
    at most every `READ_S`.
    """

    def __init__(self, assembly: BatchAssembly, wait_s: float, notes: ReadNotes) -> None:
        self._assembly, self._wait_s, self._notes = assembly, wait_s, notes
        self._since: float | None = None
        self._made: int | None = None
        """The next batch, if the buffer had made it when the notes were read."""
        self._warned: int | None = None

    def reset(self) -> None:
        """Begin the wait again: a batch is trained."""
        self._since = self._made = None

    def check(self, now: float) -> None:
        """Raise MissingBatch if the log lacks a batch that the buffer has made; `now` is in seconds."""
        missing = self._assembly.missing()
        if missing is None:
            self.reset()
            return
        known = self._made == missing.number
        if self._since is not None and now - self._since < (self._wait_s if known else max(self._wait_s, READ_S)):
            return
        if known:
            raise missing
        self._since = now
        made = batches_made(self._notes)
        if made is None:
            return
        if made > missing.number:
            self._made = missing.number
            log.warning("%s. The trainer ends unless it arrives within %g s", missing, self._wait_s)
        elif self._warned != missing.number:
            self._warned = missing.number
            log.warning(
                "%s, but the buffer has not made batch %d yet: another program has written it; the trainer waits",
                *(missing.later, missing.number),
            )


def batches_made(notes: ReadNotes) -> int | None:
    """How many batches all shards of the buffer have made, by their last commits; None if that is not known now."""
    try:
        found = notes("experience")
    except NotesUnavailable as error:
        log.warning("whether a batch is missing is not known: %s", error)
        return None
    present = [note for note in found.values() if not note.sealed]
    if not found or len(present) < layout_of(found):
        return None  # a shard has not committed yet, or their number is being changed
    return min(_made(note) for note in present)


def _made(note: Note) -> int:
    """The number of the next batch of a shard; the divisions of one may be at different batches for a while."""
    behind = (batch for _, batch in note.state.get("progress", {}).values())
    return min((int(note.state.get("batch", 0)), *behind))
