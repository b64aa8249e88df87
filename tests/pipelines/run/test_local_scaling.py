"""The rollout processes of a machine follow the newest decision."""

from __future__ import annotations

from functools import partial

import pytest
from recorded_fleet import RecordedFleet

from infra.kafka.topic_reader import StoredRecord
from pipelines.roles import Role, RoleProcess, processes_of_pipeline
from pipelines.run.local_scaling import ROLLOUT, follow_target, newest_target, with_rollouts
from schemas.records import ScalingDecision


def decision(number: int, target: int, dry_run: bool = False) -> ScalingDecision:
    return ScalingDecision(number, "queue", 1, 1, target, "", dry_run, 0)


def stored(*rows: ScalingDecision, transactional: bool = True) -> StoredRecord:
    return StoredRecord("scaling", 0, 0, 0, None, (), 1, rows, None, transactional)


def test_newest_decision_that_is_no_dry_run_counts() -> None:
    bounds = range(1, 10)
    assert newest_target([], 3, bounds) == 3
    assert newest_target([stored(decision(1, 2), decision(2, 5)), stored(decision(3, 9, dry_run=True))], 3, bounds) == 5


def test_decisions_of_another_program_are_ignored() -> None:
    foreign = [stored(decision(9, 8), transactional=False), *(stored(decision(9, each)) for each in (10**9, -1, 0))]
    assert newest_target([stored(decision(1, 2)), *foreign], 3, range(1, 10)) == 2


def test_other_processes_stay_beside_the_rollouts_of_the_target() -> None:
    processes = [
        RoleProcess("light", (Role("score"),)),
        *processes_of_pipeline(ROLLOUT, 3),
        RoleProcess("trainer", (Role("trainer"),)),
    ]
    assert [each.name for each in with_rollouts(processes, 1)] == ["light", "trainer", "rollout-0"]


@pytest.mark.parametrize(("notice_s", "does"), [(0.0, "publishes its work"), (60.0, "hands its work over")])
def test_missing_processes_start_and_the_last_ones_leave(notice_s: float, does: str) -> None:
    fleet, notes = RecordedFleet(), list[str]()
    follow = partial(follow_target, fleet, note=notes.append, notice_s=notice_s)  # type: ignore[arg-type]
    fleet.add(RoleProcess("light", (Role("score"),)))
    for _ in range(2):  # the second time changes nothing
        follow(3)
    assert fleet.calls == ["add light", "add rollout-0", "add rollout-1", "add rollout-2"]
    for _ in range(2):
        follow(1)
    assert fleet.calls[4:] == ["stop rollout-1", "stop rollout-2"]
    assert notes[-1] == f"rollout-2 {does} and ends, by the autoscaler's target of 1"


def test_process_that_drains_is_started_again_after_its_end() -> None:
    fleet = RecordedFleet()
    follow = partial(follow_target, fleet, note=lambda line: None, notice_s=0.0)  # type: ignore[arg-type]
    follow(2)
    follow(1)
    follow(2)
    assert fleet.calls == ["add rollout-0", "add rollout-1", "stop rollout-1"]
    fleet.end("rollout-1")
    follow(2)
    assert fleet.calls[3:] == ["add rollout-1"]
