"""Partial responses: the next owner resumes from the reported Progress, under the same version, after any failure."""

from __future__ import annotations

import pytest
from placement_harness import (
    TIMEOUT_S,
    Placement,
    assigned,
    cancelled,
    dead_letters,
    failed_by_placement,
    leases,
    partials,
    progress,
)
from record_factories import prompt, settled, trajectory, version

from operators.io.elements import Output, PartitionKey
from schemas.records import (
    Assignment,
    AssignmentRejected,
    NextOwner,
    TrajectoryClosed,
    VersionSpan,
)
from schemas.topics import PROGRESS, PROMPTS, SETTLED


@pytest.fixture
def placement() -> Placement:
    """One prompt of two samples at replica 0, under leases 1 and 2; replica 1 is idle under the same version."""
    placement = Placement()
    placement.prompts(0)
    placement.beat(0, placement.publish(0))
    placement.run()
    return placement


def lose_replica(placement: Placement, replica: int = 0, standby: int = 1, under: int = 0) -> list[Output]:
    placement.beat(standby, version(under))
    placement.beat(replica, version(under), state="stopped")
    return placement.run()


@pytest.mark.parametrize("restarted", [False, True])
def test_lost_trajectory_resumes_from_its_progress(placement: Placement, restarted: bool) -> None:
    placement.write(PROGRESS, progress("p0.0", [5, 6], 1), progress("p0.0", [7], 1, start=2))
    placement.run()
    if restarted:
        placement.restart()
    outputs = lose_replica(placement)
    assert partials(outputs) == {"p0.0": ([5, 6, 7], version(0)), "p0.1": ([], None)}
    assert assigned(outputs) == [
        ("p0.0", 1, 1),
        ("p0.1", 1, 2),
    ]  # a start that produced tokens does not count as an attempt
    assert min(leases(outputs).values()) > 2


@pytest.mark.parametrize("restarted", [False, True])
def test_second_owner_appends_to_the_partial_it_was_given(placement: Placement, restarted: bool) -> None:
    placement.write(PROGRESS, progress("p0.0", [5, 6], 1))
    placement.run()
    lease = leases(lose_replica(placement))["p0.0"]
    placement.write(PROGRESS, progress("p0.0", [99], 1, start=2))  # a late record of the first owner
    placement.write(PROGRESS, progress("p0.0", [8], lease, start=2, replica=1))
    placement.run()
    if restarted:
        placement.restart()
    outputs = lose_replica(placement, replica=1, standby=2)
    assert partials(outputs)["p0.0"] == ([5, 6, 8], version(0))


def test_lost_trajectory_waits_for_its_version_or_a_free_replica(placement: Placement) -> None:
    placement.write(PROGRESS, progress("p0.0", [5], 1))
    placement.publish(1)
    placement.prompts(*range(1, 9))
    placement.beat(1, version(1))
    assert [replica for _, replica, _ in assigned(placement.run())] == [1] * 4
    placement.beat(0, version(0), state="stopped")
    assert assigned(placement.run()) == []  # replica 1 has work under another version
    placement.beat(2, version(1))
    outputs = placement.run()
    assert partials(outputs) == {"p0.0": ([5], version(0))}  # and no fresh work: it has to load the older version
    placement.beat(2, version(0))
    assert placement.run() == []
    placement.finish(trajectory(prompt(0), 0))
    placement.beat(2, version(1))
    assert [replica for _, replica, _ in assigned(placement.run())] == [2] * 4


def test_trajectory_starts_afresh_if_its_version_is_gone(placement: Placement) -> None:
    placement.write(PROGRESS, progress("p0.0", [5], 1))
    placement.run()
    lease = leases(lose_replica(placement))["p0.0"]
    placement.write(PROGRESS, AssignmentRejected("p0.0", lease, 1, 1, "weight version 1.0 is gone", retry=True))
    outputs = placement.run()
    assert partials(outputs) == {"p0.0": ([], None)}
    assert assigned(outputs) == [("p0.0", 1, 2)]
    lease = leases(outputs)["p0.0"]
    placement.write(PROGRESS, progress("p0.0", [1, 2], lease, replica=1))
    placement.run()
    placement.restart()
    assert partials(lose_replica(placement, replica=1, standby=2))["p0.0"] == ([1, 2], version(0))


def test_trajectory_without_tokens_fails_after_max_attempts() -> None:
    placement = Placement(max_attempts=2)
    placement.prompts(0, samples=2)
    placement.publish(0)
    for incarnation in range(1, 7):
        placement.beat(0, version(0), incarnation=incarnation)
        outputs = placement.run()
        if incarnation <= 2:
            assert [attempt for name, _, attempt in assigned(outputs) if name == "p0.1"] == [incarnation]
        assert failed_by_placement(outputs) == ({"p0.1": "given up after 2 attempts"} if incarnation == 3 else {})
        lease = leases(outputs)["p0.0"]
        done = progress("p0.0", [incarnation], lease, start=incarnation - 1, incarnation=incarnation)
        placement.write(PROGRESS, done)
        placement.run()


def test_missing_progress_is_reported_and_restarts_trajectories(placement: Placement) -> None:
    placement.write(PROGRESS, progress("p0.0", [5], 1), progress("p0.0", [7], 1, start=3))
    (reason,) = dead_letters(placement.run())
    assert reason.startswith("p0.0: tokens before 3 are missing")
    assert partials(lose_replica(placement))["p0.0"] == ([], None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lease": 3}, "p0.0: lease 3 was never minted, the last is 2"),
        ({"next_owner": NextOwner(77, 1, 1)}, "p0.0: lease 77 was never minted, the last is 2"),
        ({"replica": 1}, "p0.0: replica 1 does not have lease 1"),
        ({"incarnation": 4}, "p0.0: replica 0 does not have lease 1"),
    ],
)
def test_invalid_progress_becomes_a_dead_letter(placement: Placement, changes: dict, reason: str) -> None:
    placement.write(PROGRESS, progress("p0.0", [5], **({"lease": 1} | changes)))
    outputs = placement.run()
    assert dead_letters(outputs) == [reason]
    assert partials(lose_replica(placement))["p0.0"] == ([], None)


def test_progress_of_a_fenced_replica_is_ignored_and_cancelled(placement: Placement) -> None:
    placement.beat(1, version(0))
    placement.run()
    for _ in range(3):
        placement.beat(1, version(0))
        outputs = placement.run(TIMEOUT_S / 2)
    lease = leases(outputs)
    assert placement.fenced == [0]
    placement.write(PROGRESS, progress("p0.0", [9], 1))
    placement.beat(0, version(0))  # a heartbeat of the fenced incarnation
    assert placement.run() == []
    placement.write(PROGRESS, progress("p0.0", [1], lease["p0.0"], replica=1))
    placement.run()
    assert partials(lose_replica(placement, replica=1, standby=2))["p0.0"] == ([1], version(0))


def test_progress_is_reread_from_the_present_owners_start(placement: Placement) -> None:
    def low() -> int:
        placement.run()
        group = placement.log.committed(placement.shard.config.group)
        return group.offsets[PartitionKey(PROGRESS.short_name, 0)]

    placement.write(PROGRESS, progress("p0.0", [5], 1), progress("p0.1", [5], 2), progress("p0.0", [6], 1, start=1))
    assert low() == 0
    outputs = lose_replica(placement)
    assert low() == 3  # the assignments contain it
    placement.write(PROGRESS, progress("p0.1", [6], leases(outputs)["p0.1"], start=1, replica=1))
    assert low() == 3
    placement.finish(trajectory(prompt(0), 1, lease=leases(outputs)["p0.1"], replica=1))
    assert low() > 3


def test_closed_is_written_when_a_trajectory_finishes(placement: Placement) -> None:
    placement.write(PROGRESS, progress("p0.0", [5], 1))
    placement.finish(trajectory(prompt(0), 0, lease=1), trajectory(prompt(0), 1, lease=2))
    outputs = placement.run()
    assert [output.record for output in outputs] == [TrajectoryClosed("p0.0")]
    placement.write(PROGRESS, progress("p0.0", [6], 1, start=1))
    placement.write(SETTLED, settled("p0.0", outcome="dropped"), settled("p0.1", outcome="dropped"))
    assert placement.run() == []


def test_lost_evaluation_resumes_under_its_version() -> None:
    placement = Placement()
    first = placement.publish(0)
    placement.questions(0, under=first)
    placement.beat(0, first)
    placement.run()
    placement.write(PROGRESS, progress("e0.0", [5], 1))
    placement.run()
    assert partials(lose_replica(placement)) == {"e0.0": ([5], first)}


def test_interrupt_schedule_resumes_under_any_version() -> None:
    placement = Placement(schedule="partial_rollout")
    placement.prompts(0, samples=1)
    placement.beat(0, placement.publish(0))
    placement.run()
    spans = (VersionSpan(version(0), 1), VersionSpan(version(1), 1))
    placement.publish(1)
    placement.write(PROGRESS, progress("p0.0", [5, 6], 1, version_spans=spans))
    placement.run()
    outputs = lose_replica(placement, under=1)
    assert partials(outputs) == {"p0.0": ([5, 6], None)}
    (record,) = [output.record for output in outputs if isinstance(output.record, Assignment)]
    assert record.version_spans == spans


def test_partial_too_large_for_an_inbox_starts_afresh(placement: Placement, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operators.placement.dispatch.fits_inbox", lambda prompt, tokens: tokens < 2)
    placement.write(PROGRESS, progress("p0.0", [5, 6], 1), progress("p0.1", [5], 2))
    placement.run()
    assert partials(lose_replica(placement)) == {"p0.0": ([], None), "p0.1": ([5], version(0))}


def test_prompt_too_large_for_an_inbox_fails_its_group(placement: Placement) -> None:
    placement.log.append(PROMPTS, prompt(7, text="x" * (8 * 1024 * 1024 - 40_000)), "p7")
    placement.prompts(8)
    outputs = placement.run()
    reason = "p7: the prompt is too large for an inbox"
    assert dead_letters(outputs) == [reason]
    assert failed_by_placement(outputs) == {"p7.0": reason, "p7.1": reason}
    assert [name for name, _, _ in assigned(outputs)] == ["p8.0", "p8.1"]
    placement.restart()
    assert failed_by_placement(placement.run()) == {}


def test_replaced_owner_is_cancelled(placement: Placement) -> None:
    placement.write(PROGRESS, progress("p0.0", [5], 1))
    placement.write(PROGRESS, AssignmentRejected("p0.0", 1, 0, 1, "weight version 1.0 is gone", retry=True))
    placement.beat(0, version(0), capacity=1)
    placement.beat(1, version(0))
    assert assigned(placement.run()) == [("p0.0", 1, 2)]
    placement.write(PROGRESS, progress("p0.0", [6], 1, start=1))  # replica 0 has continued
    assert cancelled(placement.run()) == {("p0.0", 0, 1)}
