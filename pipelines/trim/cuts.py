"""How far a partition may be trimmed: the offsets that readers still need, and the records before the cut."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from blake3 import blake3

from infra.kafka.admin import admin_client, end_offsets
from infra.kafka.lag import group_lags, list_groups
from infra.kafka.note import Note, place_of
from infra.kafka.properties import ClientProperties
from infra.kafka.topic_reader import raw_decoder, read_partition
from pipelines.inspect.audit.audit_run import committed_notes
from pipelines.inspect.audit.decode import DecodedRecord, decode_for_audit
from pipelines.inspect.present_notes import present_notes
from pipelines.restart_reads import LEDGER, READS
from pipelines.roles import ALL_PIPELINES
from schemas.codec import UndecodableRecord
from schemas.identity import TrajectoryKey, parse_trajectory_id
from schemas.records import MicroBatch, Prompt, Settled, WeightVersion
from schemas.topics import CATALOGUE, RELAY, RESTORE, run_prefix


@dataclass(frozen=True)
class Cut:
    """The records from `begin` to `offset` are deleted: their number, `size` in bytes, and BLAKE3 of keys and values.

    `batch` is the number of the first retained batch, if the partition holds batches and one is retained.
    """

    begin: int
    offset: int
    records: int
    size: int
    digest: str
    held_by: str
    """Why the next record is retained."""
    batch: int | None = None


LEFT_MANIFESTS = 4096
"""How many of the newest manifests a trim leaves, at least, to rollouts and relays that have not read them. One that is
further behind has left, mostly for good; if it comes back it begins with the newest ones, like a new one."""

MAY_LEAVE = ("gateway", "agents")
"""Roles whose number of processes may change: a person says which have left for good."""

RetainReason = Callable[[Any], str | None]
"""Why a record and all after it are retained; None: it may be deleted."""


def find_cut(
    client: ClientProperties,
    topic: str,
    partition: int,
    begin: int,
    limit: int,
    held_by: str,
    retain_reason: RetainReason,
) -> Cut:
    """The cut of a partition: from `begin` to its first retained record, or to `limit`, with the reason `held_by`.

    Undecodable records may be deleted: no reader uses them, and their dead letters hold copies.
    """
    digest, records, size, batch = blake3(), 0, 0, None
    offset = max(begin, limit)
    if begin < limit:
        for record in read_partition(client, topic, partition, begin, limit, raw_decoder):
            value = record.rows[0]
            rows: list[Any] = []
            with suppress(UndecodableRecord):
                rows = decode_for_audit(value, record.headers)
            if reason := next(filter(None, map(retain_reason, rows)), None):
                offset, held_by = record.offset, reason
                batch = next((row.batch for row in rows if isinstance(row, MicroBatch)), None)
                break
            for part in (record.key, value):
                digest.update(len(part or b"").to_bytes(8, "little") + (part or b""))
            records, size = records + 1, size + record.size
    return Cut(begin, offset, records, size, digest.hexdigest(), held_by, batch)


def retain_trajectories(is_closed: Callable[[TrajectoryKey], bool], last_batch: int) -> RetainReason:
    """Retain records that name an active trajectory or a batch after `last_batch`."""

    def retain_reason(row: Any) -> str | None:
        if isinstance(row, MicroBatch) and row.batch > last_batch:
            return f"batch {row.batch}"
        return next((f"trajectory {name}" for name, key in _keys(row) if not is_closed(key)), None)

    return retain_reason


def retain_manifests(first_batch: int, version: Any) -> RetainReason:
    """Retain the manifest of `version` and manifests that name batches from `first_batch` on."""

    def retain_reason(row: Any) -> str | None:
        if isinstance(row, WeightVersion) and (row.version == version or max(row.batches, default=-1) >= first_batch):
            return f"the manifest of version {row.version}"
        return None

    return retain_reason


def _keys(row: Any) -> Iterator[tuple[str, TrajectoryKey]]:
    match row:
        case DecodedRecord():
            yield f"{row.key.purpose[0]}{row.key.number}.{row.key.member}", row.key
        case Settled():
            yield row.trajectory_id, parse_trajectory_id(row.trajectory_id)
        case MicroBatch():
            yield from ((name, parse_trajectory_id(name)) for name in row.trajectory_ids)
        case Prompt():
            yield row.prompt_id, TrajectoryKey(row.purpose, row.number, 0)


_EVERY = -1
"""All partitions of a topic."""


class LogPartition(NamedTuple):
    """A partition of a topic, which has the short name `short_name`."""

    short_name: str
    partition: int

    def __str__(self) -> str:
        return f"{self.short_name}:{self.partition}"


class UnknownGroup(ValueError):
    """No program other than the run's roles, and none of MAY_LEAVE, reads as this consumer group."""


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

    `ignored`: groups of exports, other programs, gateways and agents that will not read again. Raises UnknownGroup for
    one of another role, or that does not exist.
    """
    prefix = run_prefix(run)
    lowest: dict[LogPartition, Need] = {}

    def need(short_name: str, partition: int, offset: int, who: str) -> None:
        place = LogPartition(short_name, partition)
        if place not in lowest or offset < lowest[place].offset:
            lowest[place] = Need(offset, who)

    with admin_client(client) as admin:
        groups = list_groups(admin, prefix)
        every = committed_notes(client, RESTORE.name(run))
        notes = present_notes(every)
        manifests = sum(end_offsets(admin, [RELAY.name(run)]).values())
        staying = set(ALL_PIPELINES).difference(MAY_LEAVE)
        others = {group for group in {*groups, *notes} if _pipeline(group, prefix) not in staying}
        if wrong := sorted(set(ignored) - others):
            known = f"the others are {', '.join(sorted(others))}" if others else "it has no other"
            raise UnknownGroup(f"run {run} has no group {wrong[0]} beside those of its roles; {known}")
        # A role reads on from its note; its group keeps offsets of partitions that another shard has now.
        noted = {group for group in every if _pipeline(group, prefix) in READS}
        for lag in group_lags(admin, [group for group in groups if group not in noted and group not in ignored]):
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
                    may_be_gone = short_name == RELAY.short_name and pipeline in ("rollout", "relay")
                    for where, offset in _offsets_of(note.offsets, f"{prefix}{short_name}"):
                        read = max(offset, manifests - LEFT_MANIFESTS) if may_be_gone else offset
                        need(short_name, where, read, f"group {group}")
                    continue
                # A note without ledger offsets needs all partitions from their beginnings.
                for where, offset in _offsets_of(note.ledger, f"{prefix}{short_name}") or [(_EVERY, 0)]:
                    need(short_name, where, offset, f"the ledger of {group}")
    return Needs(lowest, notes)


def _pipeline(group: str, prefix: str) -> str:
    return group.removeprefix(prefix).rpartition(".")[0]


def _offsets_of(offsets: Mapping[str, int], topic: str) -> list[tuple[int, int]]:
    """The partitions of `topic` and their offsets, from keys "topic:partition"."""
    pairs = [(place.rpartition(":"), offset) for place, offset in offsets.items()]
    return [(int(number), offset) for (name, _, number), offset in pairs if name == topic]
