"""Properties of the re-partitioning, for any decisions: one record each, for live replicas, with rising leases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decision_strategies import DECISIONS, LIVE
from hypothesis import given, settings

from operators.io.repartition import LiveReplicas, Moved, Placed, repartition
from schemas.records import Assignment, AssignmentRejected, Cancel, Release

COMMANDS = (Cancel, Release)


def records(decisions: Sequence[Any]) -> list[Any]:
    return [output.record for output in repartition([LiveReplicas(LIVE), *decisions])]


def addressed(decision: Any) -> tuple[type, int, int] | None:
    """The record of a command with its replica and incarnation; None for other decisions."""
    match decision:
        case Moved():
            return Release, decision.release.replica, decision.release.incarnation
        case Cancel():
            return Cancel, decision.replica, decision.incarnation
    return None


@settings(deadline=None, max_examples=60)
@given(DECISIONS)
def test_every_placed_becomes_one_assignment_or_one_rejection(decisions: list[Any]) -> None:
    made = [each for each in records(decisions) if isinstance(each, Assignment | AssignmentRejected)]
    wanted = [each.assignment for each in decisions if isinstance(each, Placed)]
    assert [(each.trajectory_id, each.lease) for each in made] == [(each.trajectory_id, each.lease) for each in wanted]


@settings(deadline=None, max_examples=60)
@given(DECISIONS)
def test_command_becomes_one_record_unless_its_replica_is_gone(decisions: list[Any]) -> None:
    made = [(type(each), each.replica, each.incarnation) for each in records(decisions) if isinstance(each, COMMANDS)]
    assert made == [each for each in map(addressed, decisions) if each and LIVE.get(each[1], -1) <= each[2]]


@settings(deadline=None, max_examples=60)
@given(DECISIONS)
def test_inbox_records_are_for_live_replicas_with_rising_leases(decisions: list[Any]) -> None:
    leases: dict[str, int] = {}
    for record in (each for each in records(decisions) if not isinstance(each, AssignmentRejected)):
        if isinstance(record, Assignment):
            assert LIVE[record.replica] == record.incarnation
            assert record.lease > leases.get(record.trajectory_id, 0)
            leases[record.trajectory_id] = record.lease
        assert record.incarnation >= LIVE.get(record.replica, 0)
