"""The topic catalogue, the only place that names topics. The tables in docs/topics.md are generated from it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

Retention = Literal["trim", "newest", "window"]

PREFIX = "laminar"
_RUN = re.compile(r"[A-Za-z0-9_-]{1,100}")
_MULTI_PROCESS_PRODUCERS = {"rollout", "relay", "experience", "every pipeline", "people"}
"""Producers of which a run may have several writing processes. The trainer is not among them: only rank 0 writes."""
_FENCED = (
    "placement fences a replica without heartbeats in `replicas`, which aborts its transaction; that of placement or a "
    "gateway is aborted by its next start, at the latest by its time-out, and holds the readers back until then"
)
_RESTARTED = (
    "no reader decides by time; the transaction is aborted by the writer's next start, at the latest by its time-out"
)
_PLAIN = "plain producers only: there is no transaction to wait for"


@dataclass(frozen=True, slots=True)
class Topic:
    """What one topic carries.

    `record_names` are names of record classes. `partitions` names the count that a run's configuration gives: one,
    shards, batch shares (times the divisions of the experience buffer) or replicas. `if_a_writer_dies` says, for a
    topic with several writing processes, why the open transaction of a dead writer harms no readers of the others. A
    topic that is not `transactional` is written by plain producers only, so its readers never wait for a transaction:
    placement decides which replicas are alive from `replicas`. `retention` says what Kafka deletes by itself: nothing
    before a trim, all but the newest record of each key, or records older than the run's window for measurements.
    """

    short_name: str
    record_names: tuple[str, ...]
    key: str
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    description: str
    if_a_writer_dies: str = ""
    partitions: Literal["one", "shards", "batch shares", "replicas"] = "one"
    transactional: bool = True
    retention: Retention = "trim"

    def name(self, run: str) -> str:
        """The full name in run `run`. Raises ValueError if `run` is not valid in a topic name."""
        if _RUN.fullmatch(run) is None:
            raise ValueError(f"run name {run!r} must be 1-100 letters, digits, '_' or '-'")
        return f"{PREFIX}.{run}.{self.short_name}"

    @property
    def cleanup(self) -> Literal["delete", "compact"]:
        """The setting `cleanup.policy`."""
        return "compact" if self.retention == "newest" else "delete"

    @property
    def has_several_writers(self) -> bool:
        """Whether more than one process of a run writes the topic."""
        return len(self.producers) > 1 or not _MULTI_PROCESS_PRODUCERS.isdisjoint(self.producers)

    @property
    def record_classes(self) -> tuple[type, ...]:
        """The classes of `record_names`. They need pyarrow, so they are imported on first use."""
        return _classes(self.record_names)


@cache
def _classes(names: tuple[str, ...]) -> tuple[type, ...]:
    from schemas import records

    return tuple(getattr(records, name) for name in names)


PROMPTS = Topic(
    "prompts",
    ("Prompt",),
    "prompt_id",
    ("prompts",),
    ("placement",),
    "one record per prompt; placement expands it to its samples",
)
EVAL_PROMPTS = Topic(
    "eval-prompts",
    ("Prompt",),
    "prompt_id",
    ("evaluation",),
    ("placement",),
    "evaluation prompts, on a topic of their own so that they never queue behind training prompts",
)
CURRICULUM = Topic(
    "curriculum",
    ("LevelRequest", "LevelReply"),
    "kind",
    ("experience", "prompts"),
    ("prompts", "experience"),
    "requests for a level of difficulty, and replies that name the first prompt of that level",
    _RESTARTED,
)
LEVEL_REQUEST, LEVEL_REPLY = "request", "reply"
"""Keys of the topic `curriculum`: each side reads only the records of the other."""
BATCH_ASSEMBLY = Topic(
    "batch-assembly",
    ("BatchProposal", "BatchSelection", "LevelSuccess"),
    "kind",
    ("experience",),
    ("experience",),
    "how several shards of the buffer form a batch: groups proposed by each, selected by the first; else empty",
    _RESTARTED,
)
PROPOSAL, SELECTION, SUCCESS = "proposal", "selection", "success"
"""Keys of the topic `batch-assembly`. Every shard reads the whole topic, so all number the batches alike."""
INBOX = Topic(
    "inbox",
    ("Assignment", "Cancel", "Reserve", "Release", "Drain", "TurnRequest", "EpisodeEnd", "StageGroup"),
    "",
    ("placement", "rollout", "gateway", "people"),
    ("rollout", "gateway", "agents"),
    "assignments and commands for a replica, requests of agents; partition = replica; a hand-over is written by its "
    "source replica",
    f"a replica that waits for its inbox keeps sending heartbeats; {_FENCED}",
    partitions="replicas",
)
PROGRESS = Topic(
    "progress",
    ("Progress", "AssignmentRejected", "TrajectoryClosed", "TurnEnded"),
    "replica_id",
    ("rollout", "placement"),
    ("placement", "gateway"),
    "progress of running trajectories; placement folds it into the partial response pool",
    f"placement reads the progress of other replicas later; it takes liveness from `replicas` alone; {_FENCED}",
)
TRAJECTORIES = Topic(
    "trajectories",
    ("Trajectory",),
    "group_id",
    ("rollout", "placement"),
    ("score", "placement", "gateway", "agents"),
    "finished samples, each of exactly one weight version; a record may hold rows of several groups, under the key of "
    "the first",
    f"score waits, and decides nothing by time; {_FENCED}",
    partitions="shards",
)
EXPERIENCES = Topic(
    "experiences",
    ("Experience",),
    "group_id",
    ("score", "import"),
    ("experience", "evaluation"),
    "trajectories with rewards; exportable; a record may hold rows of several groups, under the key of the first",
    _RESTARTED,
    partitions="shards",
)
SETTLED = Topic(
    "settled",
    ("Settled",),
    "",
    ("experience", "evaluation"),
    ("placement", "autoscaler"),
    "the outcome of each trajectory, written in the transaction that decides it",
    f"placement admits no new work meanwhile; {_RESTARTED}",
)
BATCHES = Topic(
    "batches",
    ("MicroBatch",),
    "batch",
    ("experience",),
    ("trainer",),
    "a shard's part of a global batch is one transaction of micro-batches; partition = share × divisions + division",
    "each partition has one writer, its shard of the buffer",
    partitions="batch shares",
)
RELAY = Topic(
    "relay",
    ("WeightVersion",),
    "version",
    ("trainer", "people"),
    ("relay", "rollout", "placement", "experience", "evaluation"),
    "weight manifests, never weights; `laminar weights publish` writes them, too",
    _PLAIN,
    transactional=False,
)
RELAY_CHAIN = Topic(
    "relay-chain",
    ("RelayChain",),
    "run",
    ("placement",),
    ("relay", "trainer", "placement"),
    "the master relay and the order of the relays",
    retention="newest",
)
CONTROL = Topic(
    "control",
    ("Pause",),
    "pause",
    ("people",),
    ("placement", "experience"),
    "whether the run is paused, by whom and since when; the last record is valid",
    _PLAIN,
    transactional=False,
    retention="newest",
)
PAUSE = "pause"
"""The key of all records of the topic `control`, and the name of the metric with which placement confirms them."""
PLACEMENT = "placement"
"""The name of placement's metric, and its key."""
RANKS = Topic(
    "ranks",
    ("RankAddress",),
    "start",
    ("trainer",),
    ("trainer",),
    "the address of the trainer's rendezvous",
    transactional=False,
    retention="newest",
)
REPLICAS = Topic(
    "replicas",
    ("ReplicaStatus", "StageStatus", "RelayStatus", "RelayArrival"),
    "replica_id",
    ("rollout", "relay"),
    ("placement", "relay", "autoscaler"),
    "heartbeats, and what a relay or replica has of a version that is arriving",
    _PLAIN,
    transactional=False,
    retention="newest",
)
PLANS = Topic(
    "plans",
    ("RepackPlan", "MoveOutcome", "GroupPlan"),
    "plan_id",
    ("placement",),
    (),
    "planned moves of trajectories, with the load before and after, and the outcome of each move; stage groups",
)
SCALING = Topic(
    "scaling",
    ("ScalingDecision", "ScalingOutcome"),
    "kind",
    ("autoscaler",),
    ("autoscaler",),
    "decisions about the number of rollout processes, and their outcomes; `laminar run` follows the newest decision",
)
DECISION, OUTCOME = "decision", "outcome"
"""Keys of the topic `scaling`: the autoscaler reads its own decisions back."""
METRICS = Topic(
    "metrics",
    ("Metric",),
    "name",
    ("every pipeline",),
    ("autoscaler",),
    "measurements for the live view and the reports; counters of each role's steps",
    "a view is not updated until the transaction ends; the autoscaler treats the trainer's idle share as unknown "
    "after the heartbeat time-out",
    retention="window",
)
STEP_COUNTERS = "steps/"
"""Prefix of the names of metrics with the counters of a role's steps; the role follows. Their step is the shard."""
PHASE_SECONDS = "time/"
"""Prefix of those of their values that are seconds in a phase of the role's fold."""
DEAD_LETTERS = Topic(
    "dead-letters",
    ("DeadLetter",),
    "",
    ("every pipeline",),
    (),
    "records that could not be processed, with their payload",
    "read by people",
)
RESTORE = Topic(
    "restore",
    ("CommitNote",),
    "group",
    ("every pipeline",),
    (),
    "the last note of each shard: offsets, ledger floors, saved state; written in the transaction it describes",
    "a start recognises its own transactions by their markers, and does not wait for those of others",
    retention="newest",
)
TRIM_POINTS = Topic(
    "trim-points",
    ("TrimPoint",),
    "number",
    ("people",),
    (),
    "where the log begins after a trim, with counts and digests of the deleted records",
    _PLAIN,
    transactional=False,
)
RUN_RELEASE = "release"
"""The key of the run's release on the topic `schemas`; all other keys are schemas."""
SCHEMAS = Topic(
    "schemas",
    ("RecordSchema", "RunRelease"),
    "schema",
    ("every pipeline", "people"),
    (),
    "how to decode the values of every topic, by the header `laminar-schema`, for programs without Laminar; and the "
    "release of the run's oldest roles, which every role reads when it starts",
    _PLAIN,
    transactional=False,
    retention="newest",
)

RUN_FILES = Topic(
    "run-files",
    ("RunFilePart", "RunFiles"),
    "file/part",
    ("trainer",),
    (),
    "the settings and the model's small files, read by `laminar submit rollout` and `relay` on hosts that have neither",
    transactional=False,
    retention="newest",
)
ALL_FILES = "files"
"""The key of the list of all files on the topic `run-files`; all other keys are parts of files."""

CATALOGUE: Mapping[str, Topic] = {
    topic.short_name: topic
    for topic in (
        PROMPTS,
        EVAL_PROMPTS,
        CURRICULUM,
        BATCH_ASSEMBLY,
        INBOX,
        PROGRESS,
        TRAJECTORIES,
        EXPERIENCES,
        SETTLED,
        BATCHES,
        RELAY,
        RELAY_CHAIN,
        CONTROL,
        RANKS,
        REPLICAS,
        PLANS,
        SCALING,
        METRICS,
        DEAD_LETTERS,
        RESTORE,
        TRIM_POINTS,
        SCHEMAS,
        RUN_FILES,
    )
}

OF_WORK = frozenset(topic.short_name for topic in (EVAL_PROMPTS, INBOX, TRAJECTORIES, EXPERIENCES, BATCHES))
"""Topics whose lag is work that waits. `prompts` keeps up to `placement.prompt_lead` records on purpose; of the others
offsets are committed only with a role's outputs, so that their lag says nothing."""


def group_name(run: str, pipeline: str, shard: int = 0) -> str:
    """The consumer group of one shard of a pipeline; its transactional.id is the same."""
    return f"{PREFIX}.{run}.{pipeline}.{shard}"


def partition_of(number: int, partitions: int) -> int:
    """The partition of all records of prompt `number` in a topic with `partitions` partitions.

    It is not a hash: numbers stay dense within a partition, so its set of finished prompts is a low-water mark plus a
    few exceptions.
    """
    return number % partitions


def inbox_partition(replica: int) -> int:
    """The partition of `inbox` that is the inbox of a replica."""
    return replica


def batch_partitions(share: int, divisions: int) -> range:
    """The partitions of `batches` with share `share` of each batch, one per division of the buffer, in their order."""
    return range(share * divisions, (share + 1) * divisions)


def run_prefix(run: str) -> str:
    """The prefix of all topics and groups of `run`. Raises ValueError if `run` is not valid in a topic name."""
    return PROMPTS.name(run).removesuffix(PROMPTS.short_name)


def run_of(topic: str) -> str | None:
    """The run to which the topic with full name `topic` belongs; None if it is not a topic of a run."""
    prefix, _, rest = topic.partition(".")
    run, _, short_name = rest.partition(".")
    return run if prefix == PREFIX and short_name in CATALOGUE and _RUN.fullmatch(run) else None
