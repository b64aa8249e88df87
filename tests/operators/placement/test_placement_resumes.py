"""What was told of a trajectory is what its next owner goes on from, under the same version, whoever has died."""

from __future__ import annotations

from typing import Any

import pytest
from placement_harness import TIMEOUT_S, Placement, assigned, cancelled, given_up, leases
from record_factories import prompt, settled, trajectory, version
from test_partial_pool import response

from operators.io.elements import Output, PartitionKey
from schemas.records import (
    Assignment,
    AssignmentRejected,
    DeadLetter,
    NextOwner,
    PolicyVersion,
    Progress,
    TrajectoryClosed,
    VersionSpan,
)
from schemas.topics import PROGRESS, PROMPTS, SETTLED


def progress(name: str, tokens: list[int], lease: int, start: int = 0, under: int = 0, **changes: Any) -> Progress:
    fields = {
        "trajectory_id": name,
        "lease": lease,
        "attempt": 1,
        "replica": 0,
        "incarnation": 1,
        "start": start,
        "gained": response(tokens),
        "version_spans": (VersionSpan(version(under), len(tokens)),),
        "next_owner": None,
        "first_token_at": None,
        "written_at": 0,
    }
    return Progress(**(fields | changes))


def partials(outputs: list[Output]) -> dict[str, tuple[list[int], PolicyVersion | None]]:
    """What each assignment resumes from, and under which version."""
    records = [output.record for output in outputs if isinstance(output.record, Assignment)]
    return {
        r.trajectory_id: ([] if r.partial is None else r.partial.token_ids.to_pylist(), r.policy_version)
        for r in records
    }


def letters(outputs: list[Output]) -> list[str]:
    return [output.record.reason for output in outputs if isinstance(output.record, DeadLetter)]


@pytest.fixture
def placement() -> Placement:
    """One prompt of two samples at replica 0, under leases 1 and 2; replica 1 stands by under the same version."""
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
def test_a_lost_trajectory_goes_on_from_what_was_told(placement: Placement, restarted: bool) -> None:
    placement.tell(PROGRESS, progress("p0.0", [5, 6], 1), progress("p0.0", [7], 1, start=2))
    placement.run()
    if restarted:
        placement.restart()
    outputs = lose_replica(placement)
    assert partials(outputs) == {"p0.0": ([5, 6, 7], version(0)), "p0.1": ([], None)}
    assert assigned(outputs) == [("p0.0", 1, 1), ("p0.1", 1, 2)]  # what has gained is no attempt
    assert min(leases(outputs).values()) > 2


@pytest.mark.parametrize("restarted", [False, True])
def test_what_a_second_owner_adds_is_added_to_what_it_was_given(placement: Placement, restarted: bool) -> None:
    placement.tell(PROGRESS, progress("p0.0", [5, 6], 1))
    placement.run()
    lease = leases(lose_replica(placement))["p0.0"]
    placement.tell(PROGRESS, progress("p0.0", [99], 1, start=2))  # of the first, late
    placement.tell(PROGRESS, progress("p0.0", [8], lease, start=2, replica=1))
    placement.run()
    if restarted:
        placement.restart()
    outputs = lose_replica(placement, replica=1, standby=2)
    assert partials(outputs)["p0.0"] == ([5, 6, 8], version(0))


def test_it_waits_for_a_replica_of_its_version_or_one_that_has_nothing_to_do(placement: Placement) -> None:
    placement.tell(PROGRESS, progress("p0.0", [5], 1))
    placement.publish(1)
    placement.prompts(*range(1, 9))
    placement.beat(1, version(1))
    assert [replica for _, replica, _ in assigned(placement.run())] == [1] * 4
    placement.beat(0, version(0), state="stopped")
    assert assigned(placement.run()) == []  # replica 1 is at work under another version
    placement.beat(2, version(1))
    outputs = placement.run()
    assert partials(outputs) == {"p0.0": ([5], version(0))}  # and nothing fresh: it is to load the old version
    placement.beat(2, version(0))
    assert placement.run() == []
    placement.finish(trajectory(prompt(0), 0))
    placement.beat(2, version(1))
    assert [replica for _, replica, _ in assigned(placement.run())] == [2] * 4


def test_where_its_version_is_gone_it_starts_afresh(placement: Placement) -> None:
    placement.tell(PROGRESS, progress("p0.0", [5], 1))
    placement.run()
    lease = leases(lose_replica(placement))["p0.0"]
    placement.tell(PROGRESS, AssignmentRejected("p0.0", lease, 1, 1, "weight version 1.0 is gone", retry=True))
    outputs = placement.run()
    assert partials(outputs) == {"p0.0": ([], None)}
    assert assigned(outputs) == [("p0.0", 1, 2)]
    lease = leases(outputs)["p0.0"]
    placement.tell(PROGRESS, progress("p0.0", [1, 2], lease, replica=1))
    placement.run()
    placement.restart()
    assert partials(lose_replica(placement, replica=1, standby=2))["p0.0"] == ([1, 2], version(0))


def test_a_trajectory_that_gains_nothing_ends_and_one_that_does_goes_on() -> None:
    placement = Placement(max_attempts=2)
    placement.prompts(0, samples=2)
    placement.publish(0)
    for life in range(1, 7):
        placement.beat(0, version(0), incarnation=life)
        outputs = placement.run()
        if life <= 2:
            assert [attempt for name, _, attempt in assigned(outputs) if name == "p0.1"] == [life]
        assert given_up(outputs) == ({"p0.1": "given up after 2 attempts"} if life == 3 else {})
        lease = leases(outputs)["p0.0"]
        placement.tell(PROGRESS, progress("p0.0", [life], lease, start=life - 1, incarnation=life))
        placement.run()


def test_what_is_missing_is_told_and_it_starts_afresh_when_it_is_lost(placement: Placement) -> None:
    placement.tell(PROGRESS, progress("p0.0", [5], 1), progress("p0.0", [7], 1, start=3))
    (reason,) = letters(placement.run())
    assert reason.startswith("p0.0: what came before token 3 is missing")
    assert partials(lose_replica(placement))["p0.0"] == ([], None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lease": 3}, "p0.0: lease 3 was never given, the last is 2"),
        ({"next_owner": NextOwner(77, 1, 1)}, "p0.0: lease 77 was never given, the last is 2"),
        ({"replica": 1}, "p0.0: replica 1 does not have lease 1"),
        ({"incarnation": 4}, "p0.0: replica 0 does not have lease 1"),
    ],
)
def test_what_cannot_be_right_is_set_aside(placement: Placement, changes: dict, reason: str) -> None:
    placement.tell(PROGRESS, progress("p0.0", [5], **({"lease": 1} | changes)))
    outputs = placement.run()
    assert letters(outputs) == [reason]
    assert partials(lose_replica(placement))["p0.0"] == ([], None)


def test_a_zombie_changes_nothing_and_is_told_to_stop(placement: Placement) -> None:
    placement.beat(1, version(0))
    placement.run()
    for _ in range(3):
        placement.beat(1, version(0))
        outputs = placement.run(TIMEOUT_S / 2)
    lease = leases(outputs)
    assert placement.fenced == [0]
    placement.tell(PROGRESS, progress("p0.0", [9], 1))
    placement.beat(0, version(0))  # it is heard again, under the incarnation that was fenced
    assert placement.run() == []
    placement.tell(PROGRESS, progress("p0.0", [1], lease["p0.0"], replica=1))
    placement.run()
    assert partials(lose_replica(placement, replica=1, standby=2))["p0.0"] == ([1], version(0))


def test_progress_is_read_again_from_where_the_present_owner_began(placement: Placement) -> None:
    def low() -> int:
        placement.run()
        group = placement.log.committed(placement.shard.config.group)
        return group.offsets[PartitionKey(PROGRESS.short_name, 0)]

    placement.tell(PROGRESS, progress("p0.0", [5], 1), progress("p0.1", [5], 2), progress("p0.0", [6], 1, start=1))
    assert low() == 0
    outputs = lose_replica(placement)
    assert low() == 3  # the assignments hold it all
    placement.tell(PROGRESS, progress("p0.1", [6], leases(outputs)["p0.1"], start=1, replica=1))
    assert low() == 3
    placement.finish(trajectory(prompt(0), 1, lease=leases(outputs)["p0.1"], replica=1))
    assert low() > 3


def test_the_end_of_what_was_told_is_told(placement: Placement) -> None:
    placement.tell(PROGRESS, progress("p0.0", [5], 1))
    placement.finish(trajectory(prompt(0), 0, lease=1), trajectory(prompt(0), 1, lease=2))
    outputs = placement.run()
    assert [output.record for output in outputs] == [TrajectoryClosed("p0.0")]
    placement.tell(PROGRESS, progress("p0.0", [6], 1, start=1))
    placement.tell(SETTLED, settled("p0.0", outcome="dropped"), settled("p0.1", outcome="dropped"))
    assert placement.run() == []


def test_an_evaluation_goes_on_under_its_version_too() -> None:
    placement = Placement()
    first = placement.publish(0)
    placement.questions(0, under=first)
    placement.beat(0, first)
    placement.run()
    placement.tell(PROGRESS, progress("e0.0", [5], 1))
    placement.run()
    assert partials(lose_replica(placement)) == {"e0.0": ([5], first)}


def test_where_weights_interrupt_it_goes_on_under_any() -> None:
    placement = Placement(schedule="partial_rollout")
    placement.prompts(0, samples=1)
    placement.beat(0, placement.publish(0))
    placement.run()
    spans = (VersionSpan(version(0), 1), VersionSpan(version(1), 1))
    placement.publish(1)
    placement.tell(PROGRESS, progress("p0.0", [5, 6], 1, version_spans=spans))
    placement.run()
    outputs = lose_replica(placement, under=1)
    assert partials(outputs) == {"p0.0": ([5, 6], None)}
    (record,) = [output.record for output in outputs if isinstance(output.record, Assignment)]
    assert record.version_spans == spans


def test_what_is_too_large_for_an_inbox_starts_afresh(placement: Placement, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operators.placement.dispatch.fits_inbox", lambda prompt, tokens: tokens < 2)
    placement.tell(PROGRESS, progress("p0.0", [5, 6], 1), progress("p0.1", [5], 2))
    placement.run()
    assert partials(lose_replica(placement)) == {"p0.0": ([], None), "p0.1": ([5], version(0))}


def test_a_prompt_that_no_inbox_takes_is_set_aside_and_its_group_ends(placement: Placement) -> None:
    placement.log.append(PROMPTS, prompt(7, text="x" * (8 * 1024 * 1024 - 40_000)), "p7")
    placement.prompts(8)
    outputs = placement.run()
    reason = "p7: a prompt so large fits into no inbox"
    assert letters(outputs) == [reason]
    assert given_up(outputs) == {"p7.0": reason, "p7.1": reason}
    assert [name for name, _, _ in assigned(outputs)] == ["p8.0", "p8.1"]
    placement.restart()
    assert given_up(placement.run()) == {}


def test_nobody_who_was_replaced_works_on(placement: Placement) -> None:
    placement.tell(PROGRESS, progress("p0.0", [5], 1))
    placement.tell(PROGRESS, AssignmentRejected("p0.0", 1, 0, 1, "weight version 1.0 is gone", retry=True))
    placement.beat(0, version(0), capacity=1)
    placement.beat(1, version(0))
    assert assigned(placement.run()) == [("p0.0", 1, 2)]
    placement.tell(PROGRESS, progress("p0.0", [6], 1, start=1))  # replica 0 has gone on after all
    assert cancelled(placement.run()) == {("p0.0", 0, 1)}
