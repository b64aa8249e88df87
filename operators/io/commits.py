"""The transactions of a shard: each holds whole emissions, in order, with the checkpoint of the last one.

So outputs and low-water mark move together. Emissions that together exceed MAX_TRANSACTION_BYTES are split over several
transactions; one emission is never split.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from infra.kafka.session import Partition, Session, SessionLost
from infra.kafka.sessions import Sessions
from operators.io.coalesce import coalesce
from operators.io.config import ShardConfig
from operators.io.elements import Emission
from schemas.topics import Topic

Floors = Mapping[str, int]
"""Offsets by "topic:partition"."""


class LedgerFloors:
    """The floors of those emissions of one start that a restart may still need.

    `noted` is from the last commit note before this start: the floor of the ledger that was read back, which counts as
    emission 0. `ends` are the end offsets of the ledger partitions at this start; its own outputs come after them.
    """

    def __init__(self, noted: Floors, ends: Floors) -> None:
        self._known = dict(ends)
        self._floors: dict[int, Floors] = {0: dict(noted)}

    def emit(self, number: int) -> None:
        """Record that emission `number`, which has outputs, is about to be written."""
        self._floors[number] = self._known

    def written(self, first: Floors) -> None:
        """Record a committed transaction; `first` are its lowest offsets in any topics."""
        self._known = self._known | {place: first[place] for place in self._known.keys() & first.keys()}

    def offsets(self, oldest: int | None) -> Floors:
        """The floors for the commit note when the oldest emission still needed is `oldest` (None: none is).

        Older floors are dropped. An emission without outputs has no floor: that of the next one is returned.
        """
        for number in [n for n in self._floors if oldest is None or n < oldest]:
            del self._floors[number]
        return next(iter(self._floors.values()), self._known)


MAX_TRANSACTION_BYTES = 32 * 1024 * 1024
"""Encoded size limit of several emissions in one transaction."""


class ShardCommits:
    """Commits emissions in the present session of a shard. One thread uses it. There is one per process and shard."""

    def __init__(self, config: ShardConfig, sessions: Sessions, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._sessions, self._clock = config, sessions, clock
        self.bytes_committed = 0
        """Bytes of the records committed so far."""
        self._session: Session | None = None
        self._taken = 0
        self._floors = LedgerFloors({}, {})
        self._committed: tuple[object, ...] = ()
        self._committed_at = 0.0
        self._names = {r.topic.short_name: r.topic.name(config.run) for r in config.inputs}

    def commit(self, emissions: Sequence[Emission]) -> None:
        """Commit `emissions`, one or more, or drop those of another start.

        Raises SessionLost, and ValueError for an output that is too large or invalid.
        """
        session = self._sessions.get(self._config.group)
        if session is None or session.lost is not None:
            return
        if session is not self._session:
            self._session, self._taken, self._committed = session, 0, ()
            self._floors = LedgerFloors(session.note.ledger, session.ledger_ends)
        emissions = self._fresh(session, emissions)
        if not emissions:
            return
        if not any(emission.outputs for emission in emissions) and not self._is_due(session, emissions[-1]):
            return
        self._write(session, emissions)
        session.verify()

    def _write(self, session: Session, emissions: Sequence[Emission]) -> None:
        """Commit `emissions` in one transaction, or in several where it would be too large."""
        records = coalesce([output for emission in emissions for output in emission.outputs], self._name)
        if len(emissions) > 1 and sum(len(record.value) for record in records) > MAX_TRANSACTION_BYTES:
            middle = len(emissions) // 2
            self._write(session, emissions[:middle])
            self._write(session, emissions[middle:])
            return
        checkpoint = emissions[-1].checkpoint
        for emission in emissions:
            if emission.outputs:
                self._floors.emit(emission.number)
        low_water = {Partition(self._names[p.topic], p.partition): o for p, o in checkpoint.low_water.items()}
        ledger = self._floors.offsets(checkpoint.ledger_from)
        self.bytes_committed += sum(len(record.value) for record in records)
        last, note_due = emissions[-1].last, self._is_note_due(emissions)
        self._floors.written(session.commit(records, low_water, ledger, checkpoint.state, last, note_due))
        if session.noted == session.commits:
            self._committed = (checkpoint.low_water, checkpoint.ledger_from, checkpoint.state)
            self._committed_at = self._clock()

    def _is_note_due(self, emissions: Sequence[Emission]) -> bool:
        """Whether the transaction of `emissions` needs the note."""
        if emissions[-1].last or self._clock() - self._committed_at >= self._config.commit_s:
            return True
        topics = {output.topic for emission in emissions for output in emission.outputs}
        return not topics or not topics.issubset(self._config.unnoted)

    def _fresh(self, session: Session, emissions: Sequence[Emission]) -> list[Emission]:
        """Emissions of this start that are new. A runner may repeat emissions; a missing one ends the session."""
        fresh = []
        for emission in emissions:
            if emission.start != session.start or emission.number <= self._taken:
                continue
            if emission.number != self._taken + 1:
                session.lost = SessionLost(
                    f"{self._config.group}: emission {emission.number} came after {self._taken}; those between are lost"
                )
                raise session.lost
            self._taken = emission.number
            fresh.append(emission)
        return fresh

    def _is_due(self, session: Session, emission: Emission) -> bool:
        """Whether to commit without outputs: a checkpoint has changed since `commit_s`, or the group's offsets are
        behind.
        """
        checkpoint = emission.checkpoint
        changed = (checkpoint.low_water, checkpoint.ledger_from, checkpoint.state) != self._committed
        old = self._clock() - self._committed_at >= self._config.commit_s
        return (changed and old) or session.group_offsets_due(emission.last)

    def _name(self, topic: Topic) -> str:
        name = self._names.get(topic.short_name)
        if name is None:
            name = self._names[topic.short_name] = topic.name(self._config.run)
        return name
