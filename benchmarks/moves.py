"""What became of planned moves, and where their time went, by the log of a run. Nothing here is emulated time."""

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


class Way(NamedTuple):
    """When a trajectory that had begun came how far on its way to another replica, in Unix milliseconds; NaN: unknown.

    `asked` and `told` are when Kafka's client was given what placement wrote, `handed` and `sent` likewise of the
    source; `kept` is when the destination said that it keeps room.
    """

    planned: float
    asked: float
    kept: float
    told: float
    handed: float
    sent: float
    resumed: float


@dataclass(frozen=True, slots=True)
class Moves:
    """Trajectories that were to move, that did, and that did so before they had begun; counted once a move.

    Medians in seconds: from a plan to the hand-over of what had begun, to its next token, and to the first of those of
    a plan; `steps_s` says how far apart the steps on the way of that first one are.
    """

    planned: int = 0
    moved: int = 0
    levelled: int = 0
    plans: int = 0
    """Plans with a trajectory that was resumed."""
    hand_over_s: float = math.nan
    resumed_s: float = math.nan
    plan_resumed_s: float = math.nan
    steps_s: dict[str, float] = field(default_factory=dict)


def moves_of(client: ClientProperties, run: str) -> Moves:
    """What was to be moved in `run`, what was, and how long it took."""
    topics = (PLANS, INBOX, REPLICAS, PROGRESS, TRAJECTORIES)
    return moves_in(record for topic in topics for record in read_topic(client, topic.name(run)))


def moves_in(records: Iterable[StoredRecord]) -> Moves:
    """The same of the records of a run's plans, inboxes, heartbeats, progress and trajectories."""
    planned_at: dict[str, int] = {}
    asked: dict[str, int] = {}
    kept: dict[str, int] = {}
    told: dict[tuple[str, int], tuple[str, int]] = {}
    sent: dict[tuple[str, int], int] = {}
    token: dict[tuple[str, int], int] = {}
    given: list[Progress] = []
    planned = 0
    for record, row in ((stored, row) for stored in records for row in stored.rows):
        match row:
            case RepackPlan():
                planned_at[row.plan_id] = row.planned_at
                planned += sum(len(move.trajectory_ids) for move in row.moves)
            case Reserve():
                asked[row.plan_id] = record.timestamp
            case ReplicaStatus():
                for part in row.reserved:
                    kept[part] = min(row.sent_at, kept.get(part, row.sent_at))
            case Release():
                for moved in zip(row.trajectory_ids, row.leases, strict=True):
                    told[moved] = row.plan_id, record.timestamp
            case Assignment():
                sent[row.trajectory_id, row.lease] = record.timestamp
            case Progress() | Trajectory():
                if row.first_token_at is not None:
                    token.setdefault((row.trajectory_id, row.lease), row.first_token_at)
                if isinstance(row, Progress) and row.next_owner is not None:
                    given.append(row)
    begun = [each for each in given if each.start + len(each.gained.token_ids)]
    ways: dict[str, list[Way]] = {}
    for each in begun:
        moved = each.trajectory_id, each.next_owner.lease
        if moved not in told:
            continue
        part, told_at = told[moved]
        plan_id = part.rpartition(".")[0]
        before = planned_at[plan_id], asked.get(part, math.nan), kept.get(part, math.nan), told_at
        way = Way(*before, each.written_at, sent.get(moved, math.nan), token.get(moved, math.nan))
        ways.setdefault(plan_id, []).append(way)
    return _measured(planned, len(given), len(given) - len(begun), list(ways.values()))


def _measured(planned: int, moved: int, levelled: int, ways: Sequence[Sequence[Way]]) -> Moves:
    resumed = [[way for way in plan if not math.isnan(way.resumed)] for plan in ways]
    firsts = [min(plan, key=lambda way: way.resumed) for plan in resumed if plan]
    steps = {
        name: _median_s(way[place] - way[place - 1] for way in firsts)
        for place, name in enumerate(Way._fields)
        if place
    }
    return Moves(
        planned,
        moved,
        levelled,
        len(firsts),
        _median_s(way.handed - way.planned for plan in ways for way in plan),
        _median_s(way.resumed - way.planned for plan in resumed for way in plan),
        _median_s(way.resumed - way.planned for way in firsts),
        steps,
    )


def _median_s(milliseconds: Iterable[float]) -> float:
    known = [each for each in milliseconds if not math.isnan(each)]
    return statistics.median(known) / 1000 if known else math.nan
