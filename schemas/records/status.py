"""Reports of roles and commands about themselves: heartbeats, metrics, dead letters, notes, trim points, schemas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from schemas.records.versions import PolicyVersion

ReplicaState = Literal["starting", "loading", "running", "draining", "stopped"]


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica's heartbeat; `process` is the shard of the rollout pipeline that hosts it.

    Written by rollout, read by placement. `capacity` is the number of requests that can run at once. KV is in tokens;
    `step_seconds` is the duration of the last engine step. `reserved` names the plans for whose trajectories it keeps
    room. `first_incarnation` is the incarnation with which its process began: those from it on were lost with their
    session, and not by a crash. 0 if it is unknown. Others fetch its KV at `kv_address` ("host:port"), empty if it
    offers none; `unreachable` are addresses of KV to which its process could not connect lately.
    """

    replica: int
    process: int
    incarnation: int
    state: ReplicaState
    policy_version: PolicyVersion | None
    running: int
    waiting: int
    capacity: int
    kv_used: int
    kv_capacity: int
    tokens_generated: int
    step_seconds: float
    host: str
    pid: int
    sent_at: int
    run: str = ""
    reserved: tuple[str, ...] = ()
    first_incarnation: int = 0
    kv_address: str = ""
    unreachable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Metric:
    """Measured values of one kind at one step. Written by every role, read by views, reports and trackers."""

    name: str
    step: int
    values: dict[str, float]
    measured_at: int


DRAW_PROMPTS = "draw prompts"
"""The step whose dead letters are of rows of prompts, not of records."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that could not be processed, with its position and payload, so that it can be processed again."""

    step: str
    reason: str
    topic: str
    """The short name of its topic; of a row of prompts, its file or task. Some of 0.2.0 have the full name."""
    partition: int
    offset: int
    payload: bytes
    failed_at: int


@dataclass(frozen=True, slots=True)
class CommitNote:
    """The state of the shard `group` as of its last commit, as JSON. Written and read by every pipeline's session."""

    group: str
    note: str
    written_at: int


@dataclass(frozen=True, slots=True)
class RankAddress:
    """The trainer's rendezvous: the store that the present start of rank 0 has opened at `host` and `port`.

    Written by rank 0, read by the other ranks; the last one of the latest start, its key, is valid. `token` names this
    start in the store. `ranks` and `shard_ranks` are those of rank 0's configuration, `model` is the BLAKE3 of its
    model's tensor names, dtypes and shapes, and `settings` has "name=value" of all other settings that ranks need in
    common: a rank with others does not register.
    """

    host: str
    port: int
    token: str
    ranks: int
    shard_ranks: int
    model: str
    written_at: int
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TrimPoint:
    """The log of a run begins here.

    Written by `laminar runs trim` before it deletes records; read by the audit, replay and lineage.

    Every trajectory of one of `purposes` whose number is below the one in `closed_below` has ended, and is included in
    `counts`: the audit's figures, named by `count_names`. Batches up to `batch` were trained into `version`, whose
    checkpoint is kept in the run's folder as `checkpoint` ("": the run has none). In each of `partitions`
    ("topic:partition") the records before `offsets` are deleted: `record_counts` records of `byte_counts` bytes, with
    the BLAKE3 of their keys and values in `digests`. Trim points are numbered from 1; the figures of each include those
    of its predecessors.
    """

    number: int
    version: PolicyVersion
    batch: int
    checkpoint: str
    purposes: tuple[str, ...]
    closed_below: tuple[int, ...]
    count_names: tuple[str, ...]
    counts: tuple[int, ...]
    partitions: tuple[str, ...]
    offsets: tuple[int, ...]
    record_counts: tuple[int, ...]
    byte_counts: tuple[int, ...]
    digests: tuple[str, ...]
    trimmed_at: int

    def first_offset(self, topic: str, partition: int) -> int:
        """The first offset left in a partition of the topic with short name `topic`; 0 if it was not trimmed."""
        return dict(zip(self.partitions, self.offsets, strict=True)).get(f"{topic}:{partition}", 0)


@dataclass(frozen=True, slots=True)
class SchemaField:
    """A field of a record: an Arrow column or a JSON member. Dots in `name` lead into nested records."""

    name: str
    type: str
    nullable: bool


@dataclass(frozen=True, slots=True)
class RecordSchema:
    """How values with the header `laminar-schema` = `schema` are encoded.

    Written by every start of `laminar run` and `laminar submit`; read by other programs. `arrow` is an Arrow IPC stream
    without batches, which holds the schema of the record batch messages; empty for JSON.
    """

    schema: str
    encoding: Literal["arrow", "json"]
    fields: tuple[SchemaField, ...]
    arrow: bytes


@dataclass(frozen=True, slots=True)
class RunRelease:
    """The release of the oldest roles of the run, "0.2.0": all roles write records that it can read.

    Written when a run's topics are made, by `laminar runs resume` and by `laminar runs upgrade`. Every role reads the
    last one when it starts.
    """

    release: str


MAX_PAUSE_TEXT = 1000
"""Characters of a text in a request, at most."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A request to pause the run (`paused`) or to end its pause; the last one in the log is valid.

    Written by `laminar runs pause` and `laminar runs unpause`. Placement reads it, and assigns no work that has not
    begun while the run is paused; the experience buffer reads it, and its groups do not age meanwhile. Requests are
    numbered from 1. `requested_by` is a user and a host, `reason` a text for people; both may be
    empty, and have at most `MAX_PAUSE_TEXT` characters.
    """

    number: int
    paused: bool
    requested_by: str
    reason: str
    requested_at: int
