"""The records of the cycle. Each says who makes it and who eats it.

Every record is frozen and compares by value. Times are Unix milliseconds by the writer's clock, for people and reports;
no decision is taken on another machine's clock. A field is added with a new schema version and never retyped.
"""

from __future__ import annotations

from schemas.records.batch_assembly import GroupsCalled, GroupsOffered, SuccessTold
from schemas.records.batches import MicroBatch
from schemas.records.curriculum import LevelAsked, LevelBegun
from schemas.records.inbox import Assignment, Cancel, Drain, KVParcel, Release, Reserve
from schemas.records.marks import TrimMark
from schemas.records.plans import MoveEnded, PlannedMove, RepackPlan, ReplicaLoad
from schemas.records.progress import Closed, NextOwner, Progress, Refused
from schemas.records.prompts import Prompt, Sampling
from schemas.records.relays import RelayChain, RelayLink, RelayStatus
from schemas.records.status import CommitNote, DeadLetter, Metric, ReplicaState, ReplicaStatus
from schemas.records.trajectories import (
    Ending,
    Episode,
    Experience,
    Fate,
    FinishReason,
    Response,
    RewardComponent,
    Settled,
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
    Progress,
    Refused,
    Closed,
    RepackPlan,
    MoveEnded,
    Trajectory,
    Experience,
    Settled,
    MicroBatch,
    WeightVersion,
    ReplicaStatus,
    RelayStatus,
    RelayChain,
    Metric,
    DeadLetter,
    CommitNote,
    LevelAsked,
    LevelBegun,
    GroupsOffered,
    GroupsCalled,
    SuccessTold,
    TrimMark,
)

__all__ = [
    "RECORDS",
    "Assignment",
    "Cancel",
    "Closed",
    "CommitNote",
    "DeadLetter",
    "Drain",
    "Ending",
    "Episode",
    "Experience",
    "Fate",
    "FinishReason",
    "GroupsCalled",
    "GroupsOffered",
    "KVParcel",
    "LevelAsked",
    "LevelBegun",
    "Metric",
    "MicroBatch",
    "MoveEnded",
    "NextOwner",
    "PlannedMove",
    "PolicyVersion",
    "Progress",
    "Prompt",
    "Refused",
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
    "Settled",
    "SuccessTold",
    "TensorSpec",
    "Trajectory",
    "TrimMark",
    "VersionSpan",
    "WeightDelta",
    "WeightVersion",
]
