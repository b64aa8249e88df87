"""The plan of a trim: the version at which the log will begin, the cut of each partition, and the trim point.

The plan audits the run twice: the whole log, and the records that would remain. The trim point holds the difference
of the counts, so an audit after the trim gives the same counts as one before. `execute` copies the checkpoint, writes
the trim point and deletes the records; if it is killed between two of these, the next trim repeats it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from infra.clocks import wall_ms
from infra.kafka.admin import (
    TopicSpec,
    admin_client,
    beginning_offsets,
    create_topics,
    delete_records,
    end_offsets,
    list_topics,
)
from infra.kafka.producer import open_producer
from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import UnknownTopic
from infra.kafka.topic_reader import read_rows
from infra.storage import StorageFolder
from pipelines.inspect.audit.audit_run import READ_ORDER, TRANSACTION_TIMEOUT_S, Snapshot, fold_run, snapshot_of
from pipelines.inspect.audit.fold import AuditFold
from pipelines.inspect.audit.result import COUNTERS, Audit
from pipelines.inspect.audit.trim_points import PROMPT_TOPICS, TrimmedHistory, newest_trim_point, trim_points
from pipelines.inspect.log.manifests import Manifests
from pipelines.trim.cuts import (
    Cut,
    LogPartition,
    Needs,
    RetainReason,
    find_cut,
    needs_of,
    retain_manifests,
    retain_trajectories,
)
from schemas.codec import encode
from schemas.identity import Purpose
from schemas.records import PolicyVersion, Prompt, TrimPoint
from schemas.topics import (
    BATCH_ASSEMBLY,
    BATCHES,
    PROGRESS,
    RELAY,
    TRIM_POINTS,
    Topic,
    group_name,
    run_prefix,
)

TRIM_POINTS_FOLDER = "trim-points"
"""Subfolder of a run's folder with the checkpoints of its trim points."""
OF_TRAJECTORIES = tuple(topic for topic in READ_ORDER if topic is not RELAY)
OF_RESTARTS = (PROGRESS, BATCH_ASSEMBLY)
"""Topics that only restarts read."""


class TrimRefused(RuntimeError):
    """The log cannot be trimmed now. The message has the reason and the remedy."""


@dataclass(frozen=True)
class TrimPlan:
    """A planned trim. `checkpoint`: the folder that is copied for the trim point (None: an emulated run)."""

    run: str
    trim_point: TrimPoint
    checkpoint: StorageFolder | None
    cuts: Mapping[LogPartition, Cut]
    audit: Audit


def plan_trim(
    client: ClientProperties,
    run: str,
    checkpoints: Mapping[PolicyVersion, StorageFolder],
    version: PolicyVersion | None = None,
    now: Callable[[], int] = wall_ms,
    begin: Callable[[str], None] = lambda _: None,
    transaction_timeout_s: float = TRANSACTION_TIMEOUT_S,
    ignored_groups: Collection[str] = (),
) -> TrimPlan:
    """Plan a trim to `version`, by default the newest version that has a checkpoint. `begin` reports what begins.

    Raises TrimRefused, RuntimeError as the audit does, and UnknownGroup for one of `ignored_groups`.
    """
    begin("auditing the whole log")
    earlier = newest_trim_point(client, run)
    before = None if earlier is None else TrimmedHistory.of(earlier)
    needs = needs_of(client, run, ignored_groups)  # first, because the needs of an active run only shrink
    snapshot = snapshot_of(client, run, earlier, transaction_timeout_s)
    whole = fold_run(client, run, snapshot, before)
    audit = whole.audit()
    if not audit.passed:
        if newest_trim_point(client, run) != earlier:  # the audit lacks the records that it has deleted
            raise _trimmed_at_once(run)
        numbers = audit.numbers()
        raise TrimRefused(
            f"the audit of run {run} fails: {numbers['lost']} lost, {numbers['trained_twice']} trained twice (the "
            "command runs audit names them). A log that fails is not trimmed"
        )
    begin("searching the first record of each partition that is still needed")
    manifests = Manifests(client, run)
    target = _version(run, whole, checkpoints, needs, version)
    if earlier is not None and target <= earlier.version:
        if undeleted := _undeleted(client, run, earlier):
            if version not in (None, earlier.version):
                raise TrimRefused(
                    f"a trim of run {run} to version {earlier.version} was interrupted: repeat that one first, without "
                    "--version"
                )
            return TrimPlan(run, earlier, None, undeleted, audit)
        raise TrimRefused(f"the log of run {run} begins at version {earlier.version}; {target} is not newer")
    last = whole.last_batch(target)
    rest = TrimmedHistory(target, last, _closed_below(client, run, whole, last, needs))
    cuts = _cuts(client, run, snapshot, needs, rest, manifests)
    begins = {(run_prefix(run) + place.short_name, place.partition): cut.offset for place, cut in cuts.items()}
    begin("auditing what would remain of the log")
    remaining = fold_run(client, run, snapshot, rest, begins).audit()
    counts = {name: audit.numbers()[name] - remaining.numbers()[name] for name in COUNTERS}
    if not remaining.passed or remaining.in_flight != audit.in_flight or min(counts.values()) < 0:
        raise TrimRefused(
            f"the remaining log of run {run} would fail the audit: {remaining.numbers()}; please report this bug"
        )
    folder = checkpoints.get(target)
    trim_point = TrimPoint(
        number=1 if earlier is None else earlier.number + 1,
        version=target,
        batch=last,
        checkpoint="" if folder is None else f"{TRIM_POINTS_FOLDER}/{target}",
        purposes=tuple(rest.closed_below),
        closed_below=tuple(rest.closed_below.values()),
        count_names=tuple(counts),
        counts=tuple(counts.values()),
        partitions=tuple(map(str, cuts)),
        offsets=tuple(cut.offset for cut in cuts.values()),
        record_counts=tuple(cut.records for cut in cuts.values()),
        byte_counts=tuple(cut.size for cut in cuts.values()),
        digests=tuple(cut.digest for cut in cuts.values()),
        trimmed_at=now(),
    )
    return TrimPlan(run, trim_point, folder, cuts, audit)


def _version(
    run: str,
    whole: AuditFold,
    checkpoints: Mapping[PolicyVersion, StorageFolder],
    needs: Needs,
    wanted: PolicyVersion | None,
) -> PolicyVersion:
    """The version at which the log will begin. Raises TrimRefused."""
    available = set(checkpoints)
    trained = needs.notes.get(group_name(run, "trainer"))
    if not available and trained is not None and (saved := trained.state.get("trained", {}).get("published")):
        available = {PolicyVersion.parse(saved)}  # the commit note holds an emulated trainer's checkpoint
    in_lineage = {each for each in available if whole.is_in_lineage(each)}
    if wanted is not None and wanted not in in_lineage:
        existing = ", ".join(map(str, sorted(in_lineage))) or "none"
        raise TrimRefused(
            f"version {wanted} is not an ancestor of the newest version with a checkpoint; available: {existing}"
        )
    if not in_lineage:
        raise TrimRefused(
            f"run {run} has no checkpoint yet (see trainer.checkpoint_every), and a replay must start from one"
        )
    return max(in_lineage) if wanted is None else wanted


def _undeleted(client: ClientProperties, run: str, trim_point: TrimPoint) -> dict[LogPartition, Cut]:
    """The cuts of `trim_point` whose records exist: its trim was interrupted."""
    places = [LogPartition(name.rpartition(":")[0], int(name.rpartition(":")[2])) for name in trim_point.partitions]
    with admin_client(client) as admin:
        found = beginning_offsets(admin, sorted({run_prefix(run) + place.short_name for place in places}))
    begins = {(where.topic, where.partition): offset for where, offset in found.items()}
    counts = trim_point.record_counts, trim_point.byte_counts, trim_point.digests
    return {
        place: Cut(begin, offset, records, size, digest, "an interrupted trim")
        for place, offset, records, size, digest in zip(places, trim_point.offsets, *counts, strict=True)
        if (begin := begins[run_prefix(run) + place.short_name, place.partition]) < offset
    }


def _closed_below(client: ClientProperties, run: str, whole: AuditFold, last: int, needs: Needs) -> dict[Purpose, int]:
    """The audit's bounds, but at most the first prompt that placement has not dispatched: no topic names its
    trajectories yet, and they may appear later.
    """
    closed = whole.closed_below(last)
    for purpose, topic in PROMPT_TOPICS.items():
        need = needs.of(LogPartition(topic.short_name, 0))
        try:
            prompts = read_rows(client, topic.name(run), Prompt, {0: need.offset if need is not None else 0})
            first = next((prompt.number for prompt in prompts), None)
        except UnknownTopic:
            continue
        if first is not None:
            closed[purpose] = min(closed[purpose], first)
    return closed


def _cuts(
    client: ClientProperties, run: str, snapshot: Snapshot, needs: Needs, rest: TrimmedHistory, manifests: Manifests
) -> dict[LogPartition, Cut]:
    prefix = run_prefix(run)
    with admin_client(client) as admin:
        existing = set(list_topics(admin, prefix))
        topics = [t for t in (*OF_TRAJECTORIES, RELAY, *OF_RESTARTS) if t.name(run) in existing]
        names = [topic.name(run) for topic in topics]
        begins, ends = beginning_offsets(admin, names), end_offsets(admin, names)
    closed = AuditFold(before=rest)

    def cut(topic: Topic, partition: int, retain_reason: RetainReason, upper_limit: int | None = None) -> Cut:
        where = next(each for each in begins if each == (topic.name(run), partition))
        need = needs.of(LogPartition(topic.short_name, partition))
        end = min(snapshot.ends.get(where.topic, {}).get(partition, ends[where]), ends[where])
        limits = [(end, "the end of the topic")]
        limits.append((begins[where], "no consumer has committed") if need is None else (need.offset, need.who))
        if upper_limit is not None:
            limits.append((upper_limit, f"the checkpoint of version {rest.version}"))
        limit, held_by = min(limits)
        return find_cut(client, where.topic, partition, begins[where], limit, held_by, retain_reason)

    cuts: dict[LogPartition, Cut] = {}
    after = dict(enumerate(manifests[rest.version].batch_offsets))
    retain_for_trajectories = retain_trajectories(closed.is_closed, rest.batch)
    for topic in topics:
        if topic is RELAY:
            continue
        for partition in sorted(each.partition for each in begins if each.topic == topic.name(run)):
            retain_reason = retain_for_trajectories if topic in OF_TRAJECTORIES else (lambda row: None)
            upper_limit = after.get(partition) if topic is BATCHES else None
            cuts[LogPartition(topic.short_name, partition)] = cut(topic, partition, retain_reason, upper_limit)
    first_batch = min((each.batch for each in cuts.values() if each.batch is not None), default=rest.batch + 1)
    if RELAY in topics:
        cuts[LogPartition(RELAY.short_name, 0)] = cut(RELAY, 0, retain_manifests(first_batch, rest.version))
    return cuts


_DELIVER_S = 60.0


def freed_bytes(log: Path, plan: TrimPlan) -> int:
    """The bytes that the broker with its files in `log` frees after `plan`: Kafka deletes whole segments only."""
    freed = 0
    for place, cut in plan.cuts.items():
        segments = sorted((log / f"{run_prefix(plan.run)}{place}".replace(":", "-")).glob("*.log"))
        freed += sum(
            segment.stat().st_size
            for segment, following in pairwise(segments)
            if int(following.stem) <= cut.offset  # the last segment is never deleted
        )
    return freed


def execute(client: ClientProperties, plan: TrimPlan, folder: Path) -> None:
    """Execute `plan` for the run in `folder`.

    Raises CheckpointError where the checkpoint is damaged or cannot be written, DeliveryFailed and KafkaError; and
    TrimRefused, with nothing deleted, if another trim has written its point since this one was planned.
    """
    if plan.checkpoint is not None:
        copy_checkpoint(plan.checkpoint, folder / plan.trim_point.checkpoint)
    name = TRIM_POINTS.name(plan.run)
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(name, 1, config={"cleanup.policy": "delete", "retention.ms": "-1"})])
        value, headers = encode(plan.trim_point)
        with open_producer(client) as producer:
            producer.send(name, value, key=str(plan.trim_point.number).encode(), headers=headers)
            producer.flush(_DELIVER_S)
        if plan.trim_point not in trim_points(client, plan.run):  # then its records would be counted nowhere
            raise _trimmed_at_once(plan.run)
        offsets = {
            (run_prefix(plan.run) + place.short_name, place.partition): cut.offset
            for place, cut in plan.cuts.items()
            if cut.offset > cut.begin
        }
        delete_records(admin, offsets)


def _trimmed_at_once(run: str) -> TrimRefused:
    return TrimRefused(f"another command trims run {run}, too: trim it again once that one has ended")


def copy_checkpoint(source: StorageFolder, target: Path) -> None:
    """Copy the checkpoint `source` to `target` atomically. Raises CheckpointError."""
    from operators.trainer import checkpoint  # deferred: imports torch

    if not target.exists():
        checkpoint.copy_checkpoint(source, target)
