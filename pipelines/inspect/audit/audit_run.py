"""Read a run's raw topics, committed records only, and balance them. It shares no code with the operators' ledgers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from infra.kafka.admin import admin_client, beginning_offsets, list_topics
from infra.kafka.decided_ends import decided_ends
from infra.kafka.lag import group_lags, list_groups
from infra.kafka.properties import ClientProperties
from infra.kafka.reading import StoredRecord, read_topic
from pipelines.inspect.audit.decode import DecodedRecord, decode_for_audit
from pipelines.inspect.audit.fold import AuditFold
from pipelines.inspect.audit.result import Audit
from pipelines.inspect.audit.trim_points import TrimmedHistory, newest_trim_point
from schemas.records import Experience, MicroBatch, Settled, Trajectory, TrimPoint, WeightVersion
from schemas.topics import (
    BATCHES,
    CATALOGUE,
    EXPERIENCES,
    INBOX,
    RELAY,
    SETTLED,
    TRAJECTORIES,
    Topic,
    group_name,
    run_prefix,
)

READ_ORDER: tuple[Topic, ...] = (RELAY, SETTLED, BATCHES, EXPERIENCES, TRAJECTORIES, INBOX)

Marks = Mapping[tuple[str, int], int]
"""Restore offsets of one pipeline by topic and partition: nothing below is pending."""


def audit(
    client: ClientProperties,
    run: str,
    *,
    ended: bool = False,
) -> Audit:
    """Balance run `run`. `ended` says that nothing runs any more, and names what is still in flight.

    After a trim it begins at the trim point: what had ended before is counted as the trim point says. Raises
    RuntimeError if the run has no inbox, or a transaction stays open.
    """
    trim_point = newest_trim_point(client, run)
    snapshot = snapshot_of(client, run, trim_point)
    return fold_run(client, run, snapshot, None if trim_point is None else TrimmedHistory.of(trim_point)).audit(
        name_in_flight=ended
    )


def fold_run(
    client: ClientProperties,
    run: str,
    snapshot: Snapshot,
    before: TrimmedHistory | None,
    begins: Mapping[tuple[str, int], int] = MappingProxyType({}),
) -> AuditFold:
    """The fold of all that `snapshot` holds, each partition (full name, number) from where `begins` says."""
    fold = AuditFold(snapshot.trimmed, before)
    for topic in READ_ORDER:
        name = topic.name(run)
        # One partition after the other: which Trajectory of an id is its first is a matter of partition and offset.
        for partition, end in sorted(snapshot.ends.get(name, {}).items()):
            start = {partition: begins.get((name, partition), 0)}
            for record in read_topic(
                client, name, start=start, partitions=[partition], until={partition: end}, decoder=decode_for_audit
            ):
                _enter(fold, record, snapshot)
    return fold


@dataclass(frozen=True)
class Snapshot:
    """What to read, and what each stage was done with: marks by consumer of experiences, and score's."""

    ends: Mapping[str, Mapping[int, int]]
    trimmed: frozenset[str]
    marks: Mapping[str, Marks]


def snapshot_of(client: ClientProperties, run: str, trim_point: TrimPoint | None = None) -> Snapshot:
    """The ends of a run's topics, taken so that a run at work does not look as if it had lost something.

    Marks come first, then what is downstream before what is upstream: whatever has been answered is then seen to have
    been asked. What a trim point or a Settled vouches for was written in its transaction, see `decided_ends`.
    """
    with admin_client(client) as admin:
        there = set(list_topics(admin, run_prefix(run)))
        if INBOX.name(run) not in there:
            raise RuntimeError(f"run {run} has no topic {INBOX.name(run)}: there is nothing to audit")
        marks = {
            pipeline: {
                (lag.topic, lag.partition): lag.committed
                for lag in group_lags(admin, list_groups(admin, group_name(run, pipeline).removesuffix("0")))
            }
            for pipeline in ("score", "experience", "evaluation")
        }
        ends: dict[str, dict[int, int]] = {}
        for topic in READ_ORDER:
            if (name := topic.name(run)) in there:
                ends[name] = {partition: end for partition, end in decided_ends(admin, name).items() if end > 0}
        trimmed = {
            short_name
            for where, first in beginning_offsets(admin, sorted(ends)).items()
            for short_name in [CATALOGUE[where.topic.removeprefix(run_prefix(run))].short_name]
            if first > (trim_point.first_offset(short_name, where.partition) if trim_point is not None else 0)
        }
    return Snapshot(ends, frozenset(trimmed), marks)


def _enter(fold: AuditFold, record: StoredRecord, snapshot: Snapshot) -> None:
    if record.error is not None:
        fold.undecodable += 1
    where = (record.topic, record.partition)
    for row in record.rows:
        if isinstance(row, WeightVersion):
            fold.manifest(row)
        elif isinstance(row, Settled):
            fold.settled(row)
        elif isinstance(row, MicroBatch):
            fold.batch(row)
        elif isinstance(row, DecodedRecord):
            _enter_seen(fold, row, record.offset, {name: marks.get(where, 0) for name, marks in snapshot.marks.items()})


def _enter_seen(fold: AuditFold, seen: DecodedRecord, offset: int, marks: Mapping[str, int]) -> None:
    if seen.kind is Experience:
        eater = "evaluation" if seen.key.purpose == "evaluation" else "experience"
        fold.experience(seen.key, done=offset < marks[eater])
    elif seen.kind is Trajectory:
        fold.trajectory(seen.key, done=offset < marks["score"])
    else:
        fold.assignment(seen.key)
