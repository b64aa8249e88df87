"""How placement ends a trajectory that nobody will generate."""

from __future__ import annotations

from operators.placement.work import Owned
from schemas.columns import flags, floats, token_ids
from schemas.records import PolicyVersion, Response, Trajectory


def failed_trajectory(owned: Owned, reason: str, newest: PolicyVersion | None, now: int) -> Trajectory:
    """The Trajectory that says why there is none; with it the group still completes."""
    work = owned.work
    return Trajectory(
        prompt=work.prompt,
        member=work.member,
        lease=work.lease,
        attempt=work.attempt,
        replica=owned.replica,
        incarnation=owned.incarnation,
        response=Response(token_ids([]), floats([]), flags([])),
        text="",
        version_spans=(),
        newest_version=newest,
        finish_reason="failed",
        error=reason,
        started_at=now,
        first_token_at=None,
        finished_at=now,
    )
