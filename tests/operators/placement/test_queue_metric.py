"""The work that waits in placement, and what the autoscaler makes of the load that placement creates."""

from __future__ import annotations

from collections import Counter

import pytest
from placement_harness import Placement, names
from record_factories import status

from operators.autoscaler.config import AutoscalingConfig
from operators.autoscaler.load import WAITING_S, Load
from operators.autoscaler.observation import Observation
from operators.autoscaler.policies import ScalingRequest, make_policy
from operators.placement.queue_metric import EVERY_S, REPEAT_S
from schemas.records import Assignment, Metric, PolicyVersion
from schemas.topics import METRICS, PLACEMENT

SLOTS = 4


class LoadedRun:
    """A run whose replicas, of four slots each, report what placement has assigned to them."""

    def __init__(self, replicas: int, admitted: int = 100) -> None:
        self.placement, self.load = Placement(admitted=admitted), Load(10.0, 60.0)
        self.replicas, self.assigned = replicas, Counter[int]()
        self.under = self.placement.publish(0)
        self.published: list[float] = []

    def run(self, seconds: float) -> Observation:
        """Pass time, with heartbeats; returns what the autoscaler observes at its end."""
        for replica in range(self.replicas):
            beat = {"running": self.assigned[replica], "capacity": SLOTS}
            self.placement.beat(replica, self.under, **beat)
            self.load.record(status(replica, self.under, **beat), self.placement.now + seconds)
        for output in self.placement.run(seconds):
            if isinstance(output.record, Assignment):
                self.assigned[output.record.replica] += 1
            elif output.topic is METRICS:
                assert isinstance(output.record, Metric)
                assert (output.key, output.record.name) == (PLACEMENT, PLACEMENT)
                self.published.append(output.record.values["waiting"])
                self.load.record(output.record, self.placement.now)
        return self.load.observe(self.placement.now, 0, None)


def requested(seen: Observation) -> ScalingRequest | None:
    return make_policy(AutoscalingConfig("queue")).request(seen)


@pytest.mark.parametrize(
    ("groups", "admitted", "expected"),
    [
        pytest.param(1, 100, ("fewer", 1), id="a quarter of the slots"),
        pytest.param(4, 100, ("keep", 0), id="all slots"),
        pytest.param(8, 100, ("more", 6), id="twice the slots"),
        pytest.param(8, 8, ("keep", 0), id="no more is admitted"),
        pytest.param(8, 12, ("more", 4), id="half as much again is admitted"),
    ],
)
def test_queue_policy_follows_the_work_that_placement_has(
    groups: int, admitted: int, expected: tuple[str, int]
) -> None:
    run = LoadedRun(replicas=2, admitted=admitted)
    run.placement.prompts(*range(groups), samples=2)
    run.run(0.0)
    seen = run.run(EVERY_S)
    assert seen.requests == min(2 * groups, 2 * SLOTS)  # placement gives a replica no more than its slots
    found = requested(seen)
    assert found is not None
    assert (found.kind, found.processes) == expected


def test_waiting_work_is_published_at_changes_and_intervals() -> None:
    run = LoadedRun(replicas=1)
    run.placement.prompts(0, 1, samples=4)
    run.run(0.0)
    assert run.published == []  # it may be assigned soon
    run.run(EVERY_S)
    run.run(EVERY_S)
    assert run.published == [4.0]
    assert run.run(REPEAT_S).waiting == 4
    assert run.published == [4.0, 4.0]
    run.replicas = 2
    run.run(EVERY_S)
    assert run.run(EVERY_S).waiting == 0
    assert run.published == [4.0, 4.0, 0.0]
    run.run(REPEAT_S)
    assert run.published == [4.0, 4.0, 0.0]


def test_paused_run_has_no_waiting_work() -> None:
    run = LoadedRun(replicas=1)
    run.placement.prompts(0, 1, samples=4)
    run.placement.pause(1)
    run.placement.run()
    assert names(run.placement.run(EVERY_S)) == []
    assert run.placement.shard.fold._dispatcher.waiting() == 0


def test_waiting_work_of_a_silent_placement_is_forgotten() -> None:
    load = Load(10.0, 60.0)
    load.record(Metric(PLACEMENT, 1, {"waiting": 7.0}, 0), 100.0)
    assert load.observe(100.0 + WAITING_S, 0, None).waiting == 7
    assert load.observe(101.0 + WAITING_S, 0, None).waiting == 0


def test_version_of_the_metric_is_that_of_placement() -> None:
    placement = Placement()
    placement.publish(3)
    placement.prompts(0, samples=4)
    placement.run()
    (metric,) = (each.record for each in placement.run(EVERY_S) if each.topic is METRICS)
    assert (metric.step, metric.values) == (PolicyVersion(1, 3).number, {"waiting": 4.0})
