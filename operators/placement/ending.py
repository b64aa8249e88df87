"""How placement ends a trajectory that nobody will generate, and sets a record aside that cannot be right."""

from __future__ import annotations

import time

from operators.io.elements import Output, Received
from operators.io.source import MAX_PAYLOAD_BYTES
from operators.placement.work import Owned
from schemas.codec import encode
from schemas.columns import flags, floats, token_ids
from schemas.records import DeadLetter, PolicyVersion, Response, Trajectory
from schemas.topics import DEAD_LETTERS


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
        finished_at=now,
    )


def rejected(received: Received, reason: str) -> Output:
    """The dead letter of a record that was read but cannot be right."""
    topic, partition, offset, record = received
    payload = encode(record)[0][:MAX_PAYLOAD_BYTES]
    now = time.time_ns() // 10**6
    return Output(DEAD_LETTERS, topic, DeadLetter("place trajectories", reason, topic, partition, offset, payload, now))
