"""The records on the topics of a run. Each names its writer and its readers.

Every record is frozen and compares by value. Times are Unix milliseconds on the writer's clock, for people and reports;
no decision depends on the clock of another machine. A new field comes with a new schema version and keeps its type.
"""

from __future__ import annotations

from schemas.records.agents import AGENT, Branches, EpisodeEnd, Segment, TokenRange, TurnEnded, TurnRequest
from schemas.records.batches import BatchProposal, BatchSelection, LevelReply, LevelRequest, LevelSuccess, MicroBatch
from schemas.records.inbox import Assignment, Cancel, Drain, KVManifest, Release, Reserve
from schemas.records.plans import MoveOutcome, PlannedMove, RepackPlan, ReplicaLoad
from schemas.records.progress import AssignmentRejected, NextOwner, Progress, TrajectoryClosed
from schemas.records.prompts import Message, Prompt, Sampling
from schemas.records.relays import RelayChain, RelayLink, RelayStatus
from schemas.records.run_files import PART_BYTES, RunFilePart, RunFiles
from schemas.records.scaling import ScalingDecision, ScalingOutcome
from schemas.records.stage_groups import GroupPlan, RelayArrival, Stage, StageGroup, StageStatus
from schemas.records.status import (
    DRAW_PROMPTS,
    CommitNote,
    DeadLetter,
    Metric,
    Pause,
    RankAddress,
    RecordSchema,
    ReplicaState,
    ReplicaStatus,
    RunRelease,
    SchemaField,
    TrimPoint,
)
from schemas.records.trajectories import (
    MAX_MESSAGES_CHARACTERS,
    Conversation,
    Ending,
    Episode,
    Experience,
    FinishReason,
    Outcome,
    Response,
    RewardComponent,
    Settled,
    TokenSampler,
    Trajectory,
    VersionSpan,
)
from schemas.records.versions import PolicyVersion, TensorSpec, WeightDelta, WeightVersion

RECORDS: tuple[type, ...] = (
    Prompt,
    Assignment,
    Cancel,
    Reserve,
    Release,
    Drain,
    TurnRequest,
    EpisodeEnd,
    StageGroup,
    Progress,
    AssignmentRejected,
    TrajectoryClosed,
    TurnEnded,
    RepackPlan,
    MoveOutcome,
    GroupPlan,
    Trajectory,
    Experience,
    Settled,
    MicroBatch,
    WeightVersion,
    ReplicaStatus,
    StageStatus,
    RelayStatus,
    RelayArrival,
    RelayChain,
    RankAddress,
    Metric,
    DeadLetter,
    CommitNote,
    LevelRequest,
    LevelReply,
    BatchProposal,
    BatchSelection,
    LevelSuccess,
    TrimPoint,
    RecordSchema,
    RunRelease,
    Pause,
    ScalingDecision,
    ScalingOutcome,
    RunFilePart,
    RunFiles,
)
