"""A paused run: nothing begins, what has begun goes on, and nothing is forgotten at a restart."""

from __future__ import annotations

import pytest
from placement_harness import BOTH, Placement, assigned, dead_letters, leases, partials, pauses, progress
from record_factories import prompt, trajectory

from operators.placement.pauses import EVERY_S, REPEAT_S
from schemas.records import Pause
from schemas.topics import CONTROL, PROGRESS

SINCE = 1_700_000_000_000


@pytest.mark.parametrize("restarts", [0, 1, 3])
def test_paused_run_assigns_nothing_until_the_end_of_the_pause(restarts: int) -> None:
    placement = Placement()
    placement.pause(1)
    placement.prompts(0)
    placement.beat(0, placement.publish(0))
    assert assigned(placement.run()) == []
    for _ in range(restarts):
        placement.restart()
        placement.beat(0, placement.publish(0))
        assert assigned(placement.run()) == []
    placement.pause(2, paused=False)
    assert assigned(placement.run()) == BOTH


def test_last_request_in_the_log_is_valid_whatever_its_number() -> None:
    placement = Placement()
    placement.prompts(0)
    placement.pause(7)
    placement.pause(7, paused=False)
    placement.pause(3)
    placement.beat(0, placement.publish(0))
    assert assigned(placement.run()) == []
    placement.pause(3, paused=False)
    assert assigned(placement.run()) == BOTH


def test_begun_trajectories_of_a_paused_run_finish() -> None:
    placement = Placement()
    placement.prompts(0, 1, samples=3)
    placement.beat(0, placement.publish(0), capacity=4)
    lease = leases(placement.run())
    assert set(lease) == {"p0.0", "p0.1", "p0.2", "p1.0"}
    placement.pause(1)
    assert pauses(placement.run()) == [(1, {"paused": 1.0, "since": SINCE, "running": 4, "waiting": 2})]
    placement.finish(*(trajectory(prompt(0, 3), member, lease=lease[f"p0.{member}"]) for member in range(3)))
    placement.beat(0, placement.publish(0), capacity=4)
    outputs = placement.run(EVERY_S)
    assert assigned(outputs) == []
    assert pauses(outputs) == [(1, {"paused": 1.0, "since": SINCE, "running": 1, "waiting": 2})]
    placement.pause(2, paused=False)
    placement.beat(1, placement.publish(0), capacity=4)
    outputs = placement.run()
    assert [name for name, _, _ in assigned(outputs)] == ["p1.1", "p1.2"]
    assert pauses(outputs) == [(2, {"paused": 0.0})]


def test_lost_trajectory_of_a_paused_run_resumes() -> None:
    placement = Placement()
    placement.prompts(0, 1)
    newest = placement.publish(0)
    placement.beat(0, newest, capacity=2)
    lease = leases(placement.run())
    placement.write(PROGRESS, progress("p0.0", [5, 6], lease["p0.0"]))
    placement.pause(1)
    placement.run()
    placement.beat(0, newest, incarnation=2, capacity=8)
    outputs = placement.run()
    assert sorted(name for name, _, _ in assigned(outputs)) == ["p0.0", "p0.1"]
    assert partials(outputs)["p0.0"][0] == [5, 6]


def test_questions_wait_for_the_end_of_the_pause() -> None:
    placement = Placement()
    placement.pause(1)
    newest = placement.publish(0)
    placement.questions(0, under=newest)
    placement.beat(0, newest)
    assert assigned(placement.run()) == []
    placement.pause(2, paused=False)
    assert [name for name, _, _ in assigned(placement.run())] == ["e0.0"]


def test_metric_of_a_pause_is_published_at_changes_and_intervals() -> None:
    placement = Placement()
    assert pauses(placement.run()) == []
    placement.pause(1)
    assert [step for step, _ in pauses(placement.run())] == [1]
    assert pauses(placement.run(EVERY_S)) == []
    assert [step for step, _ in pauses(placement.run(REPEAT_S))] == [1]
    placement.restart()
    assert [step for step, _ in pauses(placement.run())] == [1]
    placement.pause(2, paused=False)
    assert pauses(placement.run()) == [(2, {"paused": 0.0})]
    assert pauses(placement.run(REPEAT_S)) == []


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Pause(-1, True, "", "", 0), "number is -1"),
        (Pause(1, True, "x" * 1001, "", 0), "requested_by has 1001 characters"),
        (Pause(1, True, "", "x" * 1001, 0), "reason has 1001 characters"),
        (Pause(1, True, "", "", -1), "requested_at is -1"),
    ],
)
def test_invalid_request_becomes_a_dead_letter(request_: Pause, reason: str) -> None:
    placement = Placement()
    placement.shard.validates = True
    placement.restart()
    placement.prompts(0)
    placement.write(CONTROL, request_)
    placement.beat(0, placement.publish(0))
    outputs = placement.run()
    assert assigned(outputs) == BOTH
    assert reason in dead_letters(outputs)[0]
