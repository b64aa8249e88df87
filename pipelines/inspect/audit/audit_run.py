"""Audits a run from the committed records of its raw topics. It shares no code with the operators' ledgers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from infra.kafka.admin import admin_client, beginning_offsets, list_topics, stable_ends
from infra.kafka.lag import Lag, group_lags, list_groups
from infra.kafka.note import Note, notes_in, place_of
from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import UnknownTopic
from infra.kafka.topic_reader import StoredRecord, read_batches, read_partition
from operators.io.validation import MAX_BATCHES_APART, ManifestOrder, invalid_reason
from pipelines.config import KafkaConfig
from pipelines.inspect.audit.decode import DecodedRecord, decode_for_audit
from pipelines.inspect.audit.fold import AuditFold
from pipelines.inspect.audit.result import Audit
from pipelines.inspect.audit.trim_points import TrimmedHistory, newest_trim_point
from schemas.identity import Purpose
from schemas.records import Experience, MicroBatch, Prompt, Settled, Trajectory, TrimPoint, WeightVersion
from schemas.topics import (
    BATCHES,
    CATALOGUE,
    EVAL_PROMPTS,
    EXPERIENCES,
    INBOX,
    PROMPTS,
    RELAY,
    RESTORE,
    SETTLED,
    TRAJECTORIES,
    Topic,
    group_name,
    run_prefix,
)

READ_ORDER: tuple[Topic, ...] = (RELAY, SETTLED, BATCHES, EXPERIENCES, TRAJECTORIES, INBOX, PROMPTS, EVAL_PROMPTS)

PIPELINES = ("placement", "score", "experience", "evaluation")
"""The roles whose restore offsets say what they have consumed."""
TRANSACTION_TIMEOUT_S = KafkaConfig.transaction_timeout_s
"""Of a run whose configuration is not known here."""
TRIES = 3
"""How often an audit is begun, because `laminar runs trim` has deleted records meanwhile. A trim follows one itself."""

CommittedOffsets = Mapping[tuple[str, int], int]
"""Restore offsets of one pipeline by topic and partition: no record below is pending."""


def audit(
    client: ClientProperties, run: str, *, ended: bool = False, transaction_timeout_s: float = TRANSACTION_TIMEOUT_S
) -> Audit:
    """Audit run `run`. `ended`: the run has ended, so the trajectories still in flight are named.

    After a trim the audit begins at the trim point and adds its counts. A trim writes its point before it deletes
    records, so an audit during which there is a new point begins again. Raises RuntimeError if that happens `TRIES`
    times, the run has no inbox topic, or a transaction stays open for longer than `transaction_timeout_s` of the run's
    roles allows.
    """
    trim_point = newest_trim_point(client, run)
    for _ in range(TRIES):
        before = None if trim_point is None else TrimmedHistory.of(trim_point)
        snapshot = snapshot_of(client, run, trim_point, transaction_timeout_s)
        found = fold_run(client, run, snapshot, before).audit(name_in_flight=ended)
        begun_at, trim_point = trim_point, newest_trim_point(client, run)
        if trim_point == begun_at:
            return found
    raise RuntimeError(f"run {run} was trimmed during each of {TRIES} audits: audit it again when no trim is under way")


def fold_run(
    client: ClientProperties,
    run: str,
    snapshot: Snapshot,
    before: TrimmedHistory | None,
    begins: Mapping[tuple[str, int], int] = MappingProxyType({}),
) -> AuditFold:
    """Fold the records in `snapshot`, each partition (full topic name, number) from its offset in `begins`, or 0."""
    fold, manifests = AuditFold(snapshot.trimmed, before, snapshot.written), ManifestOrder()
    for topic in READ_ORDER:
        name = topic.name(run)
        # One partition after the other: partition and offset decide which Trajectory of an id is the first.
        for partition, end in sorted(snapshot.ends.get(name, {}).items()):
            first = begins.get((name, partition), 0)
            for record in read_partition(client, name, partition, first, end, decode_for_audit):
                add_record(fold, record, snapshot, manifests)
    return fold


@dataclass(frozen=True)
class Snapshot:
    """End offsets, trimmed topics (short names), committed offsets by pipeline, and the next prompt numbers that their
    writers have committed, by purpose.
    """

    ends: Mapping[str, Mapping[int, int]]
    trimmed: frozenset[str]
    committed: Mapping[str, CommittedOffsets]
    written: Mapping[Purpose, int]


def snapshot_of(
    client: ClientProperties,
    run: str,
    trim_point: TrimPoint | None = None,
    transaction_timeout_s: float = TRANSACTION_TIMEOUT_S,
) -> Snapshot:
    """Take the end offsets of a run's topics in an order in which an active run shows no false losses.

    Committed offsets first, then downstream topics before upstream ones, so that every output has its input in the
    snapshot. The outputs of a committed offset or a Settled are in the same transaction, see `stable_ends`.
    """
    with admin_client(client) as admin:
        existing = set(list_topics(admin, run_prefix(run)))
        if INBOX.name(run) not in existing:
            raise RuntimeError(f"run {run} has no topic {INBOX.name(run)}, so it cannot be audited")
        notes = committed_notes(client, RESTORE.name(run))
        prefixes = {each: group_name(run, each).removesuffix("0") for each in PIPELINES}
        committed = {
            pipeline: _farthest(
                group_lags(admin, list_groups(admin, prefix)),
                [note for group, note in notes.items() if group.startswith(prefix)],
            )
            for pipeline, prefix in prefixes.items()
        }
        ends: dict[str, dict[int, int]] = {}
        for topic in READ_ORDER:
            if (name := topic.name(run)) in existing:
                stable = stable_ends(admin, name, transaction_timeout_s, client.pause)
                ends[name] = {partition: end for partition, end in stable.items() if end > 0}
        trimmed = {
            short_name
            for where, first in beginning_offsets(admin, sorted(ends)).items()
            for short_name in [CATALOGUE[where.topic.removeprefix(run_prefix(run))].short_name]
            if first > (trim_point.first_offset(short_name, where.partition) if trim_point is not None else 0)
        }
    return Snapshot(ends, frozenset(trimmed), committed, _prompts_written(run, notes))


def _prompts_written(run: str, notes: Mapping[str, Note]) -> dict[Purpose, int]:
    """The next prompt number of each purpose by the `notes` of the roles that write prompts; without a note none."""
    written: dict[Purpose, int] = {}
    if (prompts := notes.get(group_name(run, "prompts"))) is not None and "number" in prompts.state:
        written["train"] = prompts.state["number"]
    if (evaluation := notes.get(group_name(run, "evaluation"))) is not None and "evaluated" in evaluation.state:
        written["evaluation"] = evaluation.state["evaluated"][0]
    return written


def _farthest(lags: Iterable[Lag], notes: Iterable[Note]) -> CommittedOffsets:
    """The committed offset of each partition: the highest in the groups' offsets, which expire, and their `notes`, as a
    shard that had it before may have left one.
    """
    found: dict[tuple[str, int], int] = defaultdict(int)
    for lag in lags:
        place = lag.topic, lag.partition
        found[place] = max(lag.committed, found[place])
    for note in notes:
        for name, offset in note.offsets.items():
            found[place_of(name)] = max(offset, found[place_of(name)])
    return found


def committed_notes(client: ClientProperties, restore: str) -> dict[str, Note]:
    """The note of the last commit of each group, by group, from the topic `restore`; empty where there is none.

    Records after an open transaction are not visible, so a note may be older than the last one. This is safe: the
    offsets that a restart needs only rise.
    """
    try:
        return notes_in(read_batches(client, restore), restore)
    except UnknownTopic:
        return {}


def add_record(fold: AuditFold, record: StoredRecord, snapshot: Snapshot, manifests: ManifestOrder) -> None:
    """Add a record that was decoded by `decode_for_audit`. What no role accepts is only counted."""
    if record.error is not None:
        fold.undecodable += 1
    where = (record.topic, record.partition)
    for row in record.rows:
        if row is None or (isinstance(row, WeightVersion) and not _is_valid(row, manifests)):
            fold.undecodable += 1
        elif isinstance(row, WeightVersion):
            fold.manifest(row)
        elif isinstance(row, Settled):
            fold.settled(row)
        elif isinstance(row, MicroBatch):
            fold.batch(row)
        elif isinstance(row, Prompt):
            fold.prompt(row, consumed=record.offset < snapshot.committed["placement"].get(where, 0))
        elif isinstance(row, DecodedRecord):
            committed = {name: offsets.get(where, 0) for name, offsets in snapshot.committed.items()}
            _add_decoded(fold, row, record.offset, committed)


def _is_valid(manifest: WeightVersion, manifests: ManifestOrder) -> bool:
    """Whether `manifest` counts. One whose trainer left out batches does: those are lost."""
    before = 0 if manifest.parent is None else manifest.parent.number
    due = range(before, min(manifest.version.number, before + MAX_BATCHES_APART))
    complete = replace(manifest, batches=tuple(due)) if set(manifest.batches) <= set(due) else manifest
    return invalid_reason(complete) is None and manifests.invalid_reason(manifest) is None


def _add_decoded(fold: AuditFold, record: DecodedRecord, offset: int, committed: Mapping[str, int]) -> None:
    if record.kind is Experience:
        consumer = "evaluation" if record.key.purpose == "evaluation" else "experience"
        fold.experience(record.key, consumed=offset < committed[consumer])
    elif record.kind is Trajectory:
        fold.trajectory(record.key, consumed=offset < committed["score"])
    else:
        fold.assignment(record.key)
