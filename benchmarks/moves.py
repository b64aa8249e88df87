"""Outcomes and times of planned moves, read from the log of a run, in wall-clock time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from infra.kafka.properties import ClientProperties
from infra.kafka.topic_reader import StoredRecord, read_topic
from schemas.records import Assignment, Progress, Release, RepackPlan, ReplicaStatus, Reserve, Trajectory
from schemas.topics import INBOX, PLANS, PROGRESS, REPLICAS, TRAJECTORIES


class MoveTimes(NamedTuple):
    """Times of the move of a trajectory that has tokens to another replica, in Unix milliseconds; NaN: unknown.

    `requested` and `released` are the Kafka timestamps of placement's Reserve and Release; `handed_over` is when the
    source wrote its last Progress, `assigned` the timestamp of its Assignment; `reserved` is the time of the
    destination's first status with the reservation; `resumed` is the time of the first new token.
    """

    planned: float
    requested: float
    reserved: float
    released: float
    handed_over: float
    assigned: float
    resumed: float


@dataclass(frozen=True, slots=True)
class Moves:
    """Numbers of planned moves, of moves made, and of moves made before the first token.

    The medians, in seconds, are of moves of trajectories with tokens: from plan to hand-over, from plan to next token,
    and from plan to the first next token of the plan. `steps_s` has the median times between the steps of that first
    move.
    """

    planned: int = 0
    moved: int = 0
    without_tokens: int = 0
    plans: int = 0
    """Plans with at least one resumed trajectory."""
    hand_over_s: float = math.nan
    resumed_s: float = math.nan
    plan_resumed_s: float = math.nan
    steps_s: dict[str, float] = field(default_factory=dict)


def moves_of(client: ClientProperties, run: str) -> Moves:
    """Read the moves of `run` from its topics."""
    topics = (PLANS, INBOX, REPLICAS, PROGRESS, TRAJECTORIES)
    return moves_in(record for topic in topics for record in read_topic(client, topic.name(run)))


def moves_in(records: Iterable[StoredRecord]) -> Moves:
    """Compute the moves from records of a run's plans, inboxes, heartbeats, progress and trajectories."""
    planned_at: dict[str, int] = {}
    requested: dict[str, int] = {}
    reserved: dict[str, int] = {}
    released: dict[tuple[str, int], tuple[str, int]] = {}
    assigned: dict[tuple[str, int], int] = {}
    resumed: dict[tuple[str, int], int] = {}
    handed_over: list[Progress] = []
    planned = 0
    for record, row in ((stored, row) for stored in records for row in stored.rows):
        match row:
            case RepackPlan():
                planned_at[row.plan_id] = row.planned_at
                planned += sum(len(move.trajectory_ids) for move in row.moves)
            case Reserve():
                requested[row.plan_id] = record.timestamp
            case ReplicaStatus():
                for part in row.reserved:
                    reserved[part] = min(row.sent_at, reserved.get(part, row.sent_at))
            case Release():
                for moved in zip(row.trajectory_ids, row.leases, strict=True):
                    released[moved] = row.plan_id, record.timestamp
            case Assignment():
                assigned[row.trajectory_id, row.lease] = record.timestamp
            case Progress() | Trajectory():
                if row.first_token_at is not None:
                    resumed.setdefault((row.trajectory_id, row.lease), row.first_token_at)
                if isinstance(row, Progress) and row.next_owner is not None:
                    handed_over.append(row)
    with_tokens = [each for each in handed_over if each.start + len(each.gained.token_ids)]
    moves: dict[str, list[MoveTimes]] = {}
    for each in with_tokens:
        moved = each.trajectory_id, each.next_owner.lease
        if moved not in released:
            continue
        part, released_at = released[moved]
        plan_id = part.rpartition(".")[0]
        before = planned_at[plan_id], requested.get(part, math.nan), reserved.get(part, math.nan), released_at
        times = MoveTimes(*before, each.written_at, assigned.get(moved, math.nan), resumed.get(moved, math.nan))
        moves.setdefault(plan_id, []).append(times)
    return _summarize(planned, len(handed_over), len(handed_over) - len(with_tokens), list(moves.values()))


def _summarize(planned: int, moved: int, without_tokens: int, plans: Sequence[Sequence[MoveTimes]]) -> Moves:
    resumed = [[move for move in plan if not math.isnan(move.resumed)] for plan in plans]
    firsts = [min(plan, key=lambda move: move.resumed) for plan in resumed if plan]
    steps = {
        name: _median_s(move[step] - move[step - 1] for move in firsts)
        for step, name in enumerate(MoveTimes._fields)
        if step
    }
    return Moves(
        planned,
        moved,
        without_tokens,
        len(firsts),
        _median_s(move.handed_over - move.planned for plan in plans for move in plan),
        _median_s(move.resumed - move.planned for plan in resumed for move in plan),
        _median_s(move.resumed - move.planned for move in firsts),
        steps,
    )


def _median_s(milliseconds: Iterable[float]) -> float:
    known = [each for each in milliseconds if not math.isnan(each)]
    return statistics.median(known) / 1000 if known else math.nan
