"""What a trim would take: the version at which the log is to begin, the cut of each partition, and the trim point.

Everything that the trim point counts is audited twice: once with all that stands in the log, once with what would be
left. The difference is what the trim point says, so an audit after the trim gives the numbers of one before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from infra.kafka.admin import admin_client, beginning_offsets, end_offsets, list_topics
from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import UnknownTopic
from infra.kafka.reading import read_topic
from infra.storage import StorageFolder
from pipelines.inspect.audit.audit_run import READ_ORDER, Snapshot, fold_run, snapshot_of
from pipelines.inspect.audit.fold import AuditFold
from pipelines.inspect.audit.result import Audit
from pipelines.inspect.audit.trim_points import TrimmedHistory, newest_trim_point
from pipelines.inspect.log.manifests import Manifests
from pipelines.run.trim.cuts import Cut, Stays, find_cut, stays_of_manifests, stays_of_trajectories
from pipelines.run.trim.needs import LogPartition, Needs, needs_of
from schemas.identity import Purpose
from schemas.records import PolicyVersion, Prompt, TrimPoint
from schemas.topics import (
    BATCH_ASSEMBLY,
    BATCHES,
    EVAL_PROMPTS,
    PROGRESS,
    PROMPTS,
    RELAY,
    Topic,
    group_name,
    run_prefix,
)

TRIM_POINTS_FOLDER = "trim-points"
"""In a run's folder: the checkpoints of trim points."""
OF_TRAJECTORIES = (*(topic for topic in READ_ORDER if topic is not RELAY), PROMPTS, EVAL_PROMPTS)
OF_RESTARTS = (PROGRESS, BATCH_ASSEMBLY)
"""Topics that restarts alone read."""
FIGURES = (
    "dispatched",
    "undispatched",
    "trained",
    "untrained",
    "dropped",
    "failed",
    "evaluated",
    "imported",
    "expired",
    "duplicate_finishes",
    "settled_again",
    "undecodable",
)
"""The audit's numbers that a trim point has."""


class TrimRefused(RuntimeError):
    """The log cannot be trimmed now; the message says why, and what to do."""


@dataclass(frozen=True)
class TrimPlan:
    """A trim not yet made. The trim point keeps a copy of the folder `checkpoint` (None: an emulated run)."""

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
    now: Callable[[], int] = lambda: time.time_ns() // 10**6,
) -> TrimPlan:
    """What a trim to `version` would do; by default to the newest version of which there is a checkpoint.

    Raises TrimRefused, and RuntimeError as the audit does.
    """
    earlier = newest_trim_point(client, run)
    before = None if earlier is None else TrimmedHistory.of(earlier)
    needs = needs_of(client, run)  # first: a run at work needs less and less
    snapshot = snapshot_of(client, run, earlier)
    whole = fold_run(client, run, snapshot, before)
    audit = whole.audit()
    if not audit.passed:
        raise TrimRefused(
            f"the audit of run {run} fails: see `laminar runs audit`; its log stays whole until it passes"
        )
    manifests = Manifests(client, run)
    to = _version(run, whole, checkpoints, needs, earlier, version)
    last = whole.last_batch(to)
    rest = TrimmedHistory(to, last, _closed_below(client, run, whole, last, needs))
    cuts = _cuts(client, run, snapshot, needs, rest, manifests)
    begins = {(run_prefix(run) + place.short_name, place.partition): cut.offset for place, cut in cuts.items()}
    left = fold_run(client, run, snapshot, rest, begins).audit()
    counts = {name: audit.numbers()[name] - left.numbers()[name] for name in FIGURES}
    if not left.passed or left.in_flight != audit.in_flight or min(counts.values()) < 0:
        raise TrimRefused(f"what would be left of run {run} does not pass the audit: {left.numbers()}; report this")
    folder = checkpoints.get(to)
    trim_point = TrimPoint(
        number=1 if earlier is None else earlier.number + 1,
        version=to,
        batch=last,
        checkpoint="" if folder is None else f"{TRIM_POINTS_FOLDER}/{to}",
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
    earlier: TrimPoint | None,
    wanted: PolicyVersion | None,
) -> PolicyVersion:
    """The version at which the log is to begin. Raises TrimRefused."""
    known = set(checkpoints)
    trained = needs.notes.get(group_name(run, "trainer"))
    if not known and trained is not None and (saved := trained.state.get("trained", {}).get("published")):
        known = {PolicyVersion.parse(saved)}  # an emulated trainer's checkpoint is in its note
    on_the_line = {each for each in known if whole.is_on_the_line(each)}
    if wanted is not None and wanted not in on_the_line:
        there = ", ".join(map(str, sorted(on_the_line))) or "none"
        raise TrimRefused(f"version {wanted} has no checkpoint on the line of the newest version; there are: {there}")
    if not on_the_line:
        raise TrimRefused(f"run {run} has no checkpoint yet (trainer.checkpoint_every): a replay could begin nowhere")
    to = max(on_the_line) if wanted is None else wanted
    if earlier is not None and to <= earlier.version:
        raise TrimRefused(f"the log of run {run} begins at version {earlier.version} already; {to} is not newer")
    return to


def _closed_below(client: ClientProperties, run: str, whole: AuditFold, last: int, needs: Needs) -> dict[Purpose, int]:
    """As the fold has it, but not beyond the first prompt that placement has yet to dispatch: no topic names its
    trajectories, and they may come late.
    """
    closed = whole.closed_below(last)
    topics: dict[Purpose, Topic] = {"train": PROMPTS, "evaluation": EVAL_PROMPTS}
    for purpose, topic in topics.items():
        need = needs.of(LogPartition(topic.short_name, 0))
        try:
            prompts = read_topic(client, topic.name(run), start={0: need.offset if need is not None else 0})
            first = next((row.number for record in prompts for row in record.rows if isinstance(row, Prompt)), None)
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
        there = set(list_topics(admin, prefix))
        topics = [t for t in (*OF_TRAJECTORIES, RELAY, *OF_RESTARTS) if t.name(run) in there]
        names = [topic.name(run) for topic in topics]
        begins, ends = beginning_offsets(admin, names), end_offsets(admin, names)
    closed = AuditFold(before=rest)

    def cut(topic: Topic, partition: int, stays: Stays, most: int | None = None) -> Cut:
        where = next(each for each in begins if each == (topic.name(run), partition))
        need = needs.of(LogPartition(topic.short_name, partition))
        end = min(snapshot.ends.get(where.topic, {}).get(partition, ends[where]), ends[where])
        limits = [(end, "the end of the topic")]
        limits.append((begins[where], "nobody has read it") if need is None else (need.offset, need.who))
        if most is not None:
            limits.append((most, f"the checkpoint of version {rest.version}"))
        limit, held_by = min(limits)
        return find_cut(client, where.topic, partition, begins[where], limit, held_by, stays)

    cuts: dict[LogPartition, Cut] = {}
    after = dict(enumerate(manifests[rest.version].batch_offsets))
    of_trajectories = stays_of_trajectories(closed.is_closed, rest.batch)
    for topic in topics:
        if topic is RELAY:
            continue
        for partition in sorted(each.partition for each in begins if each.topic == topic.name(run)):
            stays = of_trajectories if topic in OF_TRAJECTORIES else (lambda row: None)
            most = after.get(partition) if topic is BATCHES else None
            cuts[LogPartition(topic.short_name, partition)] = cut(topic, partition, stays, most)
    first_batch = min((each.batch for each in cuts.values() if each.batch is not None), default=rest.batch + 1)
    if RELAY in topics:
        cuts[LogPartition(RELAY.short_name, 0)] = cut(RELAY, 0, stays_of_manifests(first_batch, rest.version))
    return cuts
