"""Dispatch with `refresh = "slot"`: replicas are never drained for training, and seldom for evaluation."""

from __future__ import annotations

from placement_harness import Placement, assigned, names, progress
from record_factories import prompt, trajectory

from operators.placement.config import PlacementConfig
from schemas.records import Assignment, PolicyVersion
from schemas.topics import PROGRESS


def with_a_newer_version() -> tuple[Placement, PolicyVersion, PolicyVersion]:
    """One replica has two trajectories under the first of these versions when the second is published."""
    placement = Placement(refresh="slot")
    placement.prompts(0, samples=2)
    older = placement.publish(0)
    placement.beat(0, older)
    assert names(placement.run()) == ["p0.0", "p0.1"]
    return placement, older, placement.publish(1)


def test_slots_get_work_before_newer_weights_arrive() -> None:
    """It begins under the weights that its replica has by then, beside trajectories of the version before."""
    placement = Placement(refresh="slot")
    placement.prompts(0, 1, samples=2)
    older = placement.publish(0)
    placement.beat(0, older)
    (first, *_) = [each.record for each in placement.run() if isinstance(each.record, Assignment)]
    assert first.at_least == older
    placement.publish(1)
    placement.prompts(2, samples=2)
    placement.beat(0, older, capacity=6)
    given = [each.record for each in placement.run() if isinstance(each.record, Assignment)]
    assert [(each.trajectory_id, each.policy_version, each.at_least) for each in given] == [
        ("p2.0", None, older),
        ("p2.1", None, older),
    ]


def test_slots_repack_nothing() -> None:
    assert not PlacementConfig(refresh="slot").rules.repack
    assert not PlacementConfig(refresh="slot", repack=True).rules.repack


def test_slots_answer_questions_of_the_version_they_reach() -> None:
    """No replica is drained for it: training goes on until the version is there, and beside it."""
    placement, older, newer = with_a_newer_version()
    placement.questions(7, under=newer)
    placement.prompts(1, samples=1)
    placement.beat(0, older)
    assert names(placement.run()) == ["p1.0"]
    placement.beat(0, newer)
    assert names(placement.run()) == ["e7.0"]


def test_slots_drain_for_a_version_that_all_have_passed() -> None:
    placement, older, newer = with_a_newer_version()
    placement.questions(7, under=older)
    placement.prompts(1, samples=1)
    placement.beat(0, newer)
    assert names(placement.run()) == []
    placement.finish(*(trajectory(prompt(0), member, under=older) for member in (0, 1)))
    assert [(name, replica) for name, replica, _ in assigned(placement.run())] == [("e7.0", 0)]


def test_slots_drain_for_lost_work_of_a_passed_version() -> None:
    """Replicas that always have work would never be free for it, and its group never complete."""
    placement, older, newer = with_a_newer_version()
    placement.write(PROGRESS, progress("p0.0", [5, 6], 1))
    placement.prompts(1, samples=2)
    placement.beat(1, newer)
    placement.run()
    placement.beat(0, older, state="stopped")
    placement.prompts(2, samples=1)
    placement.beat(1, newer, capacity=6)
    assert names(placement.run()) == []
    placement.finish(*(trajectory(prompt(1), member, under=newer) for member in (0, 1)))
    assert assigned(placement.run()) == [("p0.0", 1, 1)]
    placement.beat(1, older, capacity=6)
    assert names(placement.run()) == ["p0.1", "p2.0"]


def test_slots_take_fresh_work_once_resumed_ones_have_finished() -> None:
    placement, older, newer = with_a_newer_version()
    placement.write(PROGRESS, progress("p0.0", [5, 6], 1))
    placement.beat(0, older, state="stopped")
    placement.beat(1, newer, capacity=6)
    assert assigned(placement.run())[0] == ("p0.0", 1, 1)
    placement.prompts(1, samples=1)
    placement.beat(1, older, capacity=6)
    assert names(placement.run()) == ["p0.1", "p1.0"]
    placement.beat(1, newer, capacity=6)
    placement.prompts(2, samples=1)
    assert names(placement.run()) == []  # its next heartbeat may say that it has gone back to the older one
    placement.finish(trajectory(prompt(0), 0, under=older))
    assert names(placement.run()) == ["p2.0"]
