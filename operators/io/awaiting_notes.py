"""Records of another role that a step compares with that role's commit notes before it acts on them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from infra.kafka.role_notes import NotesUnavailable, ReadNotes
from operators.io.elements import PartitionKey, ReceivedRecord
from operators.io.pending import PendingOffsets

log = logging.getLogger(__name__)


class AwaitingNotes:
    """Records of `pipeline` that wait until the notes of its first shard can be read.

    A role writes a record and the note that covers it in one transaction, so a record that its note contradicts is of
    another program. `notes` also reads those of open transactions: the record may be visible before its note counts as
    committed. They are read at most once a poll, if a record waits. Their offsets are held in `pending`.
    """

    def __init__(self, notes: ReadNotes, pipeline: str, pending: PendingOffsets) -> None:
        self._notes, self._pipeline, self._pending = notes, pipeline, pending
        self._waiting: list[ReceivedRecord] = []
        self._warned = False

    def take(self, records: Iterable[ReceivedRecord]) -> tuple[list[ReceivedRecord], Mapping[str, Any]]:
        """`records` and those that waited, with the state in the last note ({} without one); none if it cannot be read.

        Call it with every poll.
        """
        for received in records:
            self._pending.add(PartitionKey(received.topic, received.partition), received.offset)
            self._waiting.append(received)
        if not self._waiting:
            return [], {}
        try:
            note = self._notes(self._pipeline).get(0)
        except NotesUnavailable as error:
            if not self._warned:
                log.warning("records of %s wait, because they cannot be validated now: %s", self._pipeline, error)
            self._warned = True
            return [], {}
        self._warned = False
        taken, self._waiting = self._waiting, []
        for received in taken:
            self._pending.remove(PartitionKey(received.topic, received.partition), received.offset)
        return taken, {} if note is None else note.state
