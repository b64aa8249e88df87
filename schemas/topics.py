"""The topic catalogue: every topic of a run, spelt here alone. README's topic table is generated from it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

Cleanup = Literal["delete", "compact"]

Retention = Literal["trim", "newest", "window"]

PREFIX = "laminar"
_RUN = re.compile(r"[A-Za-z0-9_-]{1,100}")
_IN_SEVERAL_PROCESSES = {"rollout", "relay", "experience", "every pipeline"}
"""Producers of which a run may have several processes that write. Of the trainer's ranks the first alone does."""
_FENCED = "whoever is silent in `replicas` is fenced by placement, which ends its transaction"
_RESTARTED = "no reader decides by time; the next start of the writer ends its transaction, at the latest its time-out"


@dataclass(frozen=True, slots=True)
class Topic:
    """What one topic carries.

    `carries` are names of record classes. `partitions` names the count that a run's configuration gives: one, shards,
    ranks (times the buffer's shards) or replicas. `shared` says, of a topic that several processes write, why the open
    transaction of one that died does no harm to those who read what the others write. A topic that is not
    `transactional` is written by plain producers alone, so its readers never wait for a transaction: placement decides
    who is alive by what stands in `replicas`. `retention` says what goes by itself: nothing before it is trimmed, all
    but the newest record of each key, or what is older than the run's window for measurements.
    """

    noun: str
    carries: tuple[str, ...]
    key: str
    partitions: Literal["one", "shards", "ranks", "replicas"]
    cleanup: Cleanup
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    about: str
    shared: str = ""
    transactional: bool = True
    retention: Retention = "trim"

    def name(self, run: str) -> str:
        """The full name in run `run`. Raises ValueError if `run` cannot stand in a topic name."""
        if _RUN.fullmatch(run) is None:
            raise ValueError(f"run name {run!r} must be 1-100 letters, digits, '_' or '-'")
        return f"{PREFIX}.{run}.{self.noun}"

    @property
    def several_writers(self) -> bool:
        """Whether more than one process of a run writes it."""
        return len(self.producers) > 1 or not _IN_SEVERAL_PROCESSES.isdisjoint(self.producers)

    @property
    def records(self) -> tuple[type, ...]:
        """The classes themselves, which need Arrow: who asks for names alone does not wait for it."""
        return _classes(self.carries)


@cache
def _classes(names: tuple[str, ...]) -> tuple[type, ...]:
    from schemas import records

    return tuple(getattr(records, name) for name in names)


PROMPTS = Topic(
    "prompts",
    ("Prompt",),
    "prompt_id",
    "one",
    "delete",
    ("prompts",),
    ("placement",),
    "one record a prompt; placement expands it to its samples",
)
EVAL_PROMPTS = Topic(
    "eval-prompts",
    ("Prompt",),
    "prompt_id",
    "one",
    "delete",
    ("evaluation",),
    ("placement",),
    "evaluation's own way in, never behind training prompts",
)
CURRICULUM = Topic(
    "curriculum",
    ("LevelRequest", "LevelReply"),
    "kind",
    "one",
    "delete",
    ("experience", "prompts"),
    ("prompts", "experience"),
    "how hard questions are to be, and from which prompt on they are: asked and answered",
    _RESTARTED,
)
LEVEL_REQUEST, LEVEL_REPLY = "request", "reply"
"""Keys of the topic `curriculum`: each side reads the records of the other alone."""
BATCH_ASSEMBLY = Topic(
    "batch-assembly",
    ("BatchProposal", "BatchSelection", "LevelSuccess"),
    "kind",
    "one",
    "delete",
    ("experience",),
    ("experience",),
    "how several shards of the buffer make a batch: what each has set aside, and what the first calls up; else empty",
    _RESTARTED,
)
PROPOSAL, SELECTION, SUCCESS = "proposal", "selection", "success"
"""Keys of the topic `batch-assembly`. Every shard reads all of it, so all number the batches alike."""
INBOX = Topic(
    "inbox",
    ("Assignment", "Cancel", "Reserve", "Release", "Drain"),
    "",
    "replicas",
    "delete",
    ("placement", "rollout", "people"),
    ("rollout",),
    "a replica's only way in: partition = replica; a hand-over is written by the replica that hands over",
    f"a replica that waits for its inbox goes on with heartbeats; {_FENCED}",
)
PROGRESS = Topic(
    "progress",
    ("Progress", "AssignmentRejected", "TrajectoryClosed"),
    "replica_id",
    "one",
    "delete",
    ("rollout", "placement"),
    ("placement",),
    "what replicas say of work under way; its fold is the partial response pool",
    f"placement learns later what others gained, and from `replicas` alone who is alive; {_FENCED}",
)
TRAJECTORIES = Topic(
    "trajectories",
    ("Trajectory",),
    "group_id",
    "shards",
    "delete",
    ("rollout", "placement"),
    ("score", "placement"),
    "finished samples, each of exactly one weight version",
    f"score waits and decides nothing by time; {_FENCED}",
)
EXPERIENCES = Topic(
    "experiences",
    ("Experience",),
    "group_id",
    "shards",
    "delete",
    ("score", "import"),
    ("experience", "evaluation"),
    "trajectories with rewards: the exportable record; rows of several groups may share one, whose key is the first's",
    _RESTARTED,
)
SETTLED = Topic(
    "settled",
    ("Settled",),
    "",
    "one",
    "delete",
    ("experience", "evaluation"),
    ("placement",),
    "the end of each trajectory's story, written in the transaction that ends it",
    f"placement admits nothing new meanwhile; {_RESTARTED}",
)
BATCHES = Topic(
    "batches",
    ("MicroBatch",),
    "batch",
    "ranks",
    "delete",
    ("experience",),
    ("trainer",),
    "one global batch = one transaction of micro-batches of each shard of the buffer; partition = rank, then shard",
    "a partition has one writer, the shard of the buffer that it belongs to",
)
RELAY = Topic(
    "relay",
    ("WeightVersion",),
    "version",
    "one",
    "delete",
    ("trainer",),
    ("relay", "rollout", "placement", "experience", "evaluation"),
    "weight manifests, never bytes",
    transactional=False,
)
RELAY_CHAIN = Topic(
    "relay-chain",
    ("RelayChain",),
    "run",
    "one",
    "compact",
    ("placement",),
    ("relay", "trainer", "placement"),
    "which relay is master, and in what order they stand",
    retention="newest",
)
REPLICAS = Topic(
    "replicas",
    ("ReplicaStatus", "RelayStatus"),
    "replica_id",
    "one",
    "compact",
    ("rollout", "relay"),
    ("placement",),
    "heartbeats",
    "plain producers alone: there is no transaction to wait for",
    transactional=False,
    retention="newest",
)
PLANS = Topic(
    "plans",
    ("RepackPlan", "MoveOutcome"),
    "plan_id",
    "one",
    "delete",
    ("placement",),
    (),
    "what placement has decided to move, with the load before and after, and what became of it",
)
METRICS = Topic(
    "metrics",
    ("Metric",),
    "name",
    "one",
    "delete",
    ("trainer", "evaluation", "experience", "rollout", "import"),
    (),
    "what the live view and the reports read",
    "read by people; a view stands still until the transaction ends",
    retention="window",
)
DEAD_LETTERS = Topic(
    "dead-letters",
    ("DeadLetter",),
    "",
    "one",
    "delete",
    ("every pipeline",),
    (),
    "records that could not be processed, whole",
    "read by people",
)
RESTORE = Topic(
    "restore",
    ("CommitNote",),
    "group",
    "one",
    "compact",
    ("every pipeline",),
    (),
    "the last note of each shard: offsets, ledger floors and marks, written in the transaction they describe",
    "a start tells its own transactions from the markers, and waits for nobody else's",
    retention="newest",
)
MARKS = Topic(
    "marks",
    ("TrimMark",),
    "number",
    "one",
    "delete",
    ("people",),
    (),
    "where the log begins since a trim, with counts and digests of what stood before",
    transactional=False,
)

CATALOGUE: Mapping[str, Topic] = {
    topic.noun: topic
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
        REPLICAS,
        PLANS,
        METRICS,
        DEAD_LETTERS,
        RESTORE,
        MARKS,
    )
}


def group_name(run: str, pipeline: str, shard: int = 0) -> str:
    """The consumer group of one shard of a pipeline; its transactional.id is the same."""
    return f"{PREFIX}.{run}.{pipeline}.{shard}"


def partition_of(number: int, partitions: int) -> int:
    """The partition of all records of prompt `number` in a topic with `partitions` partitions.

    Not a hash: numbers stay dense within a partition, so what has finished in it is a low mark plus a few exceptions.
    """
    return number % partitions


def parts_of_rank(rank: int, shards: int) -> range:
    """The partitions of batches that trainer rank `rank` reads: one of each of the `shards` of the buffer, in turn."""
    return range(rank * shards, (rank + 1) * shards)


def run_prefix(run: str) -> str:
    """What the names of all topics and groups of `run` begin with. Raises ValueError if `run` cannot be in one."""
    return PROMPTS.name(run).removesuffix(PROMPTS.noun)


def run_of(topic: str) -> str | None:
    """The run whose topic the full name `topic` is; None for a topic of something else."""
    prefix, _, rest = topic.partition(".")
    run, _, noun = rest.partition(".")
    return run if prefix == PREFIX and noun in CATALOGUE and _RUN.fullmatch(run) else None
