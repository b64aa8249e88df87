"""Progress of running trajectories. Placement folds it into the partial response pool."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.records.trajectories import Response, VersionSpan


@dataclass(frozen=True, slots=True)
class NextOwner:
    """The next owner of a trajectory, and its lease."""

    lease: int
    replica: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The tokens of a trajectory since its last Progress: from position `start` of its response on.

    Written by rollout, read by placement. `gained` was generated under `version_spans`. `first_token_at` is when this
    owner generated its first token of the trajectory, in Unix milliseconds; None if it generated none. `next_owner` is
    set in the last Progress of an owner that hands the trajectory over: its Assignment was written in the same
    transaction.
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
    """A replica's reply to an assignment it cannot run. Written by rollout, read by placement.

    `retry` False: no replica can run it.
    """

    trajectory_id: str
    lease: int
    replica: int
    incarnation: int
    reason: str
    retry: bool


@dataclass(frozen=True, slots=True)
class TrajectoryClosed:
    """Progress of this trajectory no longer counts. Written by placement, for readers that fold Progress.

    Written once the trajectory is settled, only for trajectories that have Progress.
    """

    trajectory_id: str
