"""ReportEvents: events of replicas become records of the right topic, key and partition."""

from __future__ import annotations

from decisions import assert_maps, placed, response
from record_factories import prompt, trajectory

from operators.io.elements import Output
from operators.rollout.report_events import ReportEvents
from schemas.records import AssignmentRejected, Metric, Progress
from schemas.topics import METRICS, PROGRESS, TRAJECTORIES

OTHER = Output(METRICS, "rollout", Metric("rollout", 1, {}, 0))


def test_report_events_routes_by_group_and_by_replica() -> None:
    done, refused = trajectory(prompt(5), 0), AssignmentRejected("p1.0", 1, 3, 1, "too long", False)
    progress = Progress("p2.0", 1, 1, 4, 1, 0, response(2), (), None, None, 0)
    hand_over = placed(2, 1, tokens=2)
    expected = [
        Output(TRAJECTORIES, "p5", done, 1),
        OTHER,
        Output(PROGRESS, "rollout-3", refused),
        Output(PROGRESS, "rollout-4", progress),
        hand_over,
    ]
    assert_maps(ReportEvents(partitions=2), [done, OTHER, refused, progress, hand_over], expected)
