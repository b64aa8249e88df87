"""Dispatch with `refresh = "interrupt"`: replicas load newer weights within trajectories, and are seldom empty."""

from __future__ import annotations

from placement_harness import Placement, assigned, leases, names
from record_factories import prompt, trajectory


def test_interrupt_schedule_drains_one_replica_for_evaluation() -> None:
    placement = Placement(schedule="partial_rollout", admitted=1000)
    placement.prompts(*range(20), samples=4)
    first = placement.publish(0)
    for replica in (0, 1):
        placement.beat(replica, first)
    given = leases(placement.run())
    second = placement.publish(1)
    placement.questions(0, under=first)
    for replica in (0, 1):
        placement.beat(replica, second)
    assert assigned(placement.run()) == []
    for number, replicas in ((0, []), (1, [1])):  # replica 0 is drained, whichever has less
        placement.finish(*(trajectory(prompt(number, 4), m, lease=given[f"p{number}.{m}"]) for m in (0, 1)))
        assert sorted({replica for _, replica, _ in assigned(placement.run())}) == replicas
    placement.finish(*(trajectory(prompt(0, 4), m, lease=given[f"p0.{m}"]) for m in (2, 3)))
    assert assigned(placement.run()) == [("e0.0", 0, 1)]


def test_interrupt_schedule_resumes_fresh_work_after_questions() -> None:
    """Training joined the questions of the first version, and outlives it: its replica is never empty."""
    placement = Placement(schedule="partial_rollout")
    first = placement.publish(0)
    placement.questions(0, under=first)
    placement.beat(0, first)
    asked = leases(placement.run())
    placement.prompts(0)
    assert names(placement.run()) == ["p0.0", "p0.1"]
    question = prompt(0, 1, purpose="evaluation", policy_version=first)
    placement.finish(trajectory(question, 0, lease=asked["e0.0"], under=first))
    placement.run()
    placement.beat(0, placement.publish(1))
    placement.prompts(1)
    assert names(placement.run()) == ["p1.0", "p1.1"]
