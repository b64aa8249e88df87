"""Reads what the last commit notes of the roles of a run say, without waiting for open transactions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kafka.errors import KafkaError

from infra.kafka.note import Note
from infra.kafka.session_config import Partition
from infra.kafka.shard_layout import role_notes, role_prefix
from schemas.topics import RESTORE, group_name


class NotesUnavailable(RuntimeError):
    """The notes cannot be read now."""


ReadNotes = Callable[[str], Mapping[int, Note]]
"""Returns the last committed note of each shard of a pipeline. Raises NotesUnavailable."""
NO_NOTES: ReadNotes = lambda pipeline: {}  # noqa: E731 - typed
"""Those of a run without commits."""


def notes_reader(run: str, open_observer: Callable[[], Any], *, undecided: bool = False) -> ReadNotes:
    """Reads the notes of `run`, each time by a new consumer of `open_observer`, see `uncommitted_consumer`.

    With `undecided` those of transactions count that are not committed yet.
    """

    def read(pipeline: str) -> Mapping[int, Note]:
        place, prefix = Partition(RESTORE.name(run), 0), role_prefix(group_name(run, pipeline))
        try:
            observer = open_observer()
            try:
                return role_notes(observer, place, prefix, undecided=undecided)
            finally:
                observer.close(autocommit=False)
        except (KafkaError, ValueError) as error:
            raise NotesUnavailable(f"the commit notes of {pipeline} cannot be read now: {error}") from error

    return read
