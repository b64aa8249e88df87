"""The records on the topics of a run. Each names its writer and its readers.

Every record is frozen and compares by value. Times are Unix milliseconds on the writer's clock, for people and reports;
no decision depends on the clock of another machine. A new field comes with a new schema version and keeps its type.
"""

from __future__ import annotations

from schemas.records.agents import AGENT, Branches, EpisodeEnd, Segment, TokenRange, TurnEnded, TurnRequest
from schemas.records.batch_assembly import BatchProposal, BatchSelection, LevelSuccess
from schemas.records.batches import MicroBatch
from schemas.records.curriculum import LevelReply, LevelRequest
from schemas.records.inbox import Assignment, Cancel, Drain, KVManifest, Release, Reserve
from schemas.records.pauses import Pause
from schemas.records.plans import MoveOutcome, PlannedMove, RepackPlan, ReplicaLoad
from schemas.records.progress import AssignmentRejected, NextOwner, Progress, TrajectoryClosed
from schemas.records.prompts import Message, Prompt, Sampling
from schemas.records.ranks import RankAddress
from schemas.records.record_schemas import RecordSchema, SchemaField
from schemas.records.relays import RelayChain, RelayLink, RelayStatus
from schemas.records.stage_groups import GroupPlan, RelayArrival, Stage, StageGroup, StageStatus
from schemas.records.status import CommitNote, DeadLetter, Metric, ReplicaState, ReplicaStatus
from schemas.records.trajectories import (
    Conversation,
    Ending,
    Episode,
    Experience,
    FinishReason,
    Outcome,
    Response,
    RewardComponent,
    Settled,
    Trajectory,
    VersionSpan,
)
from schemas.records.trim_points import TrimPoint
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
    Pause,
)

__all__ = [
    "AGENT",
    "RECORDS",
    "Assignment",
    "AssignmentRejected",
    "BatchProposal",
    "BatchSelection",
    "Branches",
    "Cancel",
    "CommitNote",
    "Conversation",
    "DeadLetter",
    "Drain",
    "Ending",
    "Episode",
    "EpisodeEnd",
    "Experience",
    "FinishReason",
    "GroupPlan",
    "KVManifest",
    "LevelReply",
    "LevelRequest",
    "LevelSuccess",
    "Message",
    "Metric",
    "MicroBatch",
    "MoveOutcome",
    "NextOwner",
    "Outcome",
    "Pause",
    "PlannedMove",
    "PolicyVersion",
    "Progress",
    "Prompt",
    "RankAddress",
    "RecordSchema",
    "RelayArrival",
    "RelayChain",
    "RelayLink",
    "RelayStatus",
    "Release",
    "RepackPlan",
    "ReplicaLoad",
    "ReplicaState",
    "ReplicaStatus",
    "Reserve",
    "Response",
    "RewardComponent",
    "Sampling",
    "SchemaField",
    "Segment",
    "Settled",
    "Stage",
    "StageGroup",
    "StageStatus",
    "TensorSpec",
    "TokenRange",
    "Trajectory",
    "TrajectoryClosed",
    "TrimPoint",
    "TurnEnded",
    "TurnRequest",
    "VersionSpan",
    "WeightDelta",
    "WeightVersion",
]
