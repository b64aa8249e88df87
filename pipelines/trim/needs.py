"""The offsets from which roles and other consumer groups of a run read next: a trim must not delete beyond them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from infra.kafka.admin import admin_client
from infra.kafka.lag import group_lags, list_groups
from infra.kafka.note import Note, place_of
from infra.kafka.properties import ClientProperties
from pipelines.inspect.audit.audit_run import committed_notes
from pipelines.restart_reads import LEDGER, READS
from pipelines.roles import ALL_PIPELINES
from schemas.topics import CATALOGUE, RESTORE, run_prefix

_EVERY = -1
"""All partitions of a topic."""


class LogPartition(NamedTuple):
    """A partition of a topic, which has the short name `short_name`."""

    short_name: str
    partition: int

    def __str__(self) -> str:
        return f"{self.short_name}:{self.partition}"


class UnknownGroup(ValueError):
    """No program other than the run's roles reads as this consumer group."""


class Need(NamedTuple):
    """`who` reads a partition from `offset`."""

    offset: int
    who: str


@dataclass(frozen=True)
class Needs:
    """The lowest needed offset of each partition, and the commit notes by group."""

    lowest: Mapping[LogPartition, Need]
    notes: Mapping[str, Note]

    def of(self, place: LogPartition) -> Need | None:
        """The lowest needed offset of a partition; None if no group has committed one."""
        found = filter(None, (self.lowest.get(place), self.lowest.get(LogPartition(place.short_name, _EVERY))))
        return min(found, default=None)


def needs_of(client: ClientProperties, run: str, ignored: Collection[str] = ()) -> Needs:
    """The offsets in the commit notes of `run`'s roles and exports, and those that other groups have committed.

    `ignored`: groups of exports and other programs that will not read again. Raises UnknownGroup for one of a role, or
    that does not exist.
    """
    prefix = run_prefix(run)
    lowest: dict[LogPartition, Need] = {}

    def need(short_name: str, partition: int, offset: int, who: str) -> None:
        place = LogPartition(short_name, partition)
        if place not in lowest or offset < lowest[place].offset:
            lowest[place] = Need(offset, who)

    with admin_client(client) as admin:
        groups = list_groups(admin, prefix)
        notes = committed_notes(client, RESTORE.name(run))
        others = {group for group in {*groups, *notes} if _pipeline(group, prefix) not in ALL_PIPELINES}
        if wrong := sorted(set(ignored) - others):
            known = f"the others are {', '.join(sorted(others))}" if others else "it has no other"
            raise UnknownGroup(f"run {run} has no group {wrong[0]} beside those of its roles; {known}")
        for lag in group_lags(admin, [group for group in groups if group not in ignored]):
            short_name, pipeline = lag.topic.removeprefix(prefix), _pipeline(lag.group, prefix)
            topic = CATALOGUE.get(short_name)
            if topic is not None and (pipeline in topic.consumers or pipeline not in ALL_PIPELINES):
                need(short_name, lag.partition, lag.committed, f"group {lag.group}")
        for group, note in notes.items():
            if group in ignored:
                continue
            if (pipeline := _pipeline(group, prefix)) not in READS:  # an export, whose group's offsets expire
                for place, offset in note.offsets.items():
                    topic_name, partition = place_of(place)
                    need(topic_name.removeprefix(prefix), partition, offset, f"group {group}")
            for short_name, kind in READS.get(pipeline, {}):
                if kind != LEDGER:
                    for where, offset in _offsets_of(note.offsets, f"{prefix}{short_name}"):
                        need(short_name, where, offset, f"group {group}")
                else:
                    for where, offset in _ledger(note, f"{prefix}{short_name}"):
                        need(short_name, where, offset, f"the ledger of {group}")
    return Needs(lowest, notes)


def _pipeline(group: str, prefix: str) -> str:
    return group.removeprefix(prefix).rpartition(".")[0]


def _ledger(note: Note, topic: str) -> list[tuple[int, int]]:
    """The partitions of `topic` in a note's ledger and their offsets; all partitions from their beginnings if it names
    none.
    """
    return _offsets_of(note.ledger, topic) or [(_EVERY, 0)]


def _offsets_of(offsets: Mapping[str, int], topic: str) -> list[tuple[int, int]]:
    """The partitions of `topic` and their offsets, from keys "topic:partition"."""
    pairs = [(place.rpartition(":"), offset) for place, offset in offsets.items()]
    return [(int(number), offset) for (name, _, number), offset in pairs if name == topic]
