"""What replicas say of work under way: the partial response pool is the fold of it."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.records.trajectories import Response, VersionSpan


@dataclass(frozen=True, slots=True)
class NextOwner:
    """Who has a trajectory from now on, and under which lease."""

    lease: int
    replica: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Progress:
    """What a trajectory has gained since its last Progress: tokens from position `start` of its response on.

    Made by rollout, eaten by placement. `version_spans` say what made the gain. `first_token_at` is when this owner
    made its first token of the trajectory, in Unix milliseconds; None where it has made none. `next_owner` is named by
    the last Progress of an owner that hands the trajectory over: its Assignment was written in the same transaction.
    """

    trajectory_id: str
    lease: int
    attempt: int
    replica: int
    incarnation: int
    start: int
    gained: Response
    version_spans: tuple[VersionSpan, ...]
    next_owner: NextOwner | None
    first_token_at: int | None
    written_at: int


@dataclass(frozen=True, slots=True)
class AssignmentRejected:
    """A replica's answer to an assignment it cannot run.

    `retry` False: no replica can. Made by rollout, eaten by placement.
    """

    trajectory_id: str
    lease: int
    replica: int
    incarnation: int
    reason: str
    retry: bool


@dataclass(frozen=True, slots=True)
class TrajectoryClosed:
    """Nothing counts any more that Progress may say of this trajectory. Made by placement, for whoever folds Progress.

    Written once the trajectory is settled, for those alone of which Progress has told.
    """

    trajectory_id: str
