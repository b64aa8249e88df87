"""What the next starts of a run's roles read: no trim may take it, nor what anybody else has yet to read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from infra.kafka.admin import admin_client
from infra.kafka.committed_notes import committed_notes
from infra.kafka.lag import group_lags, list_groups
from infra.kafka.note import Note
from infra.kafka.properties import ClientProperties
from pipelines.restart_reads import LEDGER, READS
from pipelines.roles import PIPELINES
from schemas.topics import CATALOGUE, RESTORE, run_prefix

_EVERY = -1
"""Stands for all partitions of a topic."""


class LogPartition(NamedTuple):
    """A partition of a topic by its noun."""

    short_name: str
    partition: int

    def __str__(self) -> str:
        return f"{self.short_name}:{self.partition}"


class Need(NamedTuple):
    """`who` reads a partition from `offset` on."""

    offset: int
    who: str


@dataclass(frozen=True)
class Needs:
    """The lowest offset that anybody needs of each partition, and the notes of commits by group."""

    lowest: Mapping[LogPartition, Need]
    notes: Mapping[str, Note]

    def of(self, place: LogPartition) -> Need | None:
        """The lowest of what is needed of a partition; None where nobody has committed to need anything of it."""
        found = filter(None, (self.lowest.get(place), self.lowest.get(LogPartition(place.short_name, _EVERY))))
        return min(found, default=None)


def needs_of(client: ClientProperties, run: str) -> Needs:
    """What the notes of `run`'s roles say that they read on from, and what groups have committed: exports above all."""
    prefix = run_prefix(run)
    lowest: dict[LogPartition, Need] = {}

    def need(short_name: str, partition: int, offset: int, who: str) -> None:
        place = LogPartition(short_name, partition)
        if place not in lowest or offset < lowest[place].offset:
            lowest[place] = Need(offset, who)

    with admin_client(client) as admin:
        groups = list_groups(admin, prefix)
        for lag in group_lags(admin, groups):
            short_name, pipeline = lag.topic.removeprefix(prefix), _pipeline(lag.group, prefix)
            known = CATALOGUE.get(short_name)
            if known is not None and (pipeline in known.consumers or pipeline not in PIPELINES):
                need(short_name, lag.partition, lag.committed, f"group {lag.group}")
        notes = committed_notes(client, RESTORE.name(run))
        for group, note in notes.items():
            for short_name, kind in READS.get(_pipeline(group, prefix), {}):
                if kind != LEDGER:
                    for where, offset in _named(note.offsets, f"{prefix}{short_name}"):
                        need(short_name, where, offset, f"group {group}")
                else:
                    for where, offset in _ledger(note, f"{prefix}{short_name}"):
                        need(short_name, where, offset, f"the ledger of {group}")
    return Needs(lowest, notes)


def _pipeline(group: str, prefix: str) -> str:
    return group.removeprefix(prefix).rpartition(".")[0]


def _ledger(note: Note, topic: str) -> list[tuple[int, int]]:
    """The partitions of `topic` that a note names, and from where each is read back; every one from its beginning where
    it names none.
    """
    return _named(note.ledger, topic) or [(_EVERY, 0)]


def _named(offsets: Mapping[str, int], topic: str) -> list[tuple[int, int]]:
    """The partitions of `topic` in offsets by "topic:partition"."""
    named = [(place.rpartition(":"), offset) for place, offset in offsets.items()]
    return [(int(number), offset) for (name, _, number), offset in named if name == topic]
