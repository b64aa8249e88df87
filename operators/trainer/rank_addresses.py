"""Where rank 0 publishes the address at which the other ranks find it: a topic of the run, or a file."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from infra.files import write_atomically
from infra.kafka.producer import open_producer
from infra.kafka.properties import ClientProperties
from infra.kafka.role_notes import NotesUnavailable, ReadNotes
from infra.kafka.topic_reader import StoredRecord, follow_topic
from schemas.codec import encode
from schemas.records import RankAddress
from schemas.topics import RANKS

log = logging.getLogger(__name__)

_WRITE_S = 60.0
_LONGEST_KEY = 20
_READ_EVERY = 4
"""Of so many polls without another address, one reads rank 0's commit note again: that opens a consumer."""


class Addresses(Protocol):
    """The newest address of rank 0."""

    def write(self, address: RankAddress, start: int = 0) -> None:
        """Publish the address of start `start` of rank 0 in place of the one before."""

    def newest(self) -> RankAddress | None:
        """The newest address, None if there is none yet; it may be that of a rank 0 that has ended."""

    def close(self) -> None:
        """Stop reading."""


class AddressFile:
    """A file that all ranks can read: for ranks that one process forks."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def write(self, address: RankAddress, start: int = 0) -> None:
        """Replace the file: its ranks have no other process of rank 0."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file, json.dumps(asdict(address)))

    def newest(self) -> RankAddress | None:
        try:
            return RankAddress(**json.loads(self._file.read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def close(self) -> None:
        """Nothing is open."""


class AddressTopic:
    """The compacted topic `ranks` of a run: ranks need no disk in common."""

    def __init__(self, client: ClientProperties, run: str, notes: ReadNotes) -> None:
        self._client, self._topic, self._notes = client, RANKS.name(run), notes
        self._polls: Iterator[list[StoredRecord]] | None = None
        self._found: dict[int, RankAddress] = {}
        """The last address of each start, without those before the newest that has begun."""
        self._polls_without = 0
        self._started = 0
        """The newest start of rank 0 that is known to have begun."""
        self._refused: set[int] = set()

    def write(self, address: RankAddress, start: int = 0) -> None:
        """Write `address` to the log. Raises DeliveryFailed, TimeoutError.

        The start is its key: compaction keeps the address of the latest, also if a paused one writes after it.
        """
        value, headers = encode(address)
        with open_producer(self._client) as producer:
            producer.send(self._topic, value, key=str(start).encode(), headers=headers)
            producer.flush(_WRITE_S)

    def newest(self) -> RankAddress | None:
        """The last address of the latest start in the log; waits up to half a second for another one.

        A record that is no address is skipped with a warning, and so is one of a start that rank 0 has not committed:
        it is of another program, unless the note becomes visible. Raises UnknownTopic, KafkaError.
        """
        if self._polls is None:
            self._polls = follow_topic(self._client, self._topic, {0: 0})
        for record in next(self._polls):
            if record.error is not None:
                log.warning("offset %d of %s is no address of rank 0: %s", record.offset, self._topic, record.error)
            for row in record.rows:
                if isinstance(row, RankAddress):
                    self._found[_start_of(record.key)] = row
                    self._polls_without = 0
        return self._newest_begun()

    def close(self) -> None:
        """Close the consumer."""
        if self._polls is not None:
            self._polls.close()  # type: ignore[attr-defined]
            self._polls = None

    def _newest_begun(self) -> RankAddress | None:
        """The address of the latest start that rank 0 has begun: it has committed the number before it listens."""
        if max(self._found, default=0) > self._started:
            if self._polls_without % _READ_EVERY == 0:
                self._started = max(self._started, self._committed_start())
            self._polls_without += 1
        begun = [start for start in self._found if start <= self._started]
        for start in self._found.keys() - begun - self._refused:
            self._refused.add(start)
            log.warning(
                "%s has an address of start %d of rank 0, but rank 0 has begun %d: it is not used before that start",
                *(self._topic, start, self._started),
            )
        for start in sorted(begun)[:-1]:
            del self._found[start]
        return self._found[max(begun)] if begun else None

    def _committed_start(self) -> int:
        """The start number of rank 0's last commit; 0 if it has none, or if that cannot be read now."""
        try:
            note = self._notes("trainer").get(0)
        except NotesUnavailable as error:
            log.warning("whether rank 0 has begun another start is not known: %s", error)
            return 0
        return 0 if note is None else note.start


def _start_of(key: bytes | None) -> int:
    """The start of rank 0 that a record's key names; 0 for one of an earlier release."""
    return int(key) if key is not None and key.isdigit() and len(key) < _LONGEST_KEY else 0
