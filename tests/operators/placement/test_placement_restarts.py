"""Restarts of placement, rejections and repeated finishes: work resumes under the next lease, with one owner."""

from __future__ import annotations

import pytest
from placement_harness import (
    BOTH,
    TIMEOUT_S,
    Placement,
    assigned,
    cancelled,
    dead_letters,
    failed_by_placement,
    leases,
    newest,
    with_one_prompt,
)
from record_factories import failed, prompt, settled, trajectory

from operators.io.elements import PartitionKey
from schemas.records import Assignment, AssignmentRejected
from schemas.topics import DEAD_LETTERS, INBOX, PROGRESS, PROMPTS, SETTLED, TRAJECTORIES


@pytest.fixture
def placement() -> Placement:
    return with_one_prompt()


def low_water(placement: Placement, place: PartitionKey) -> int:
    return placement.log.committed(placement.shard.config.group).offsets[place]


# -- finished and settled ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_word", ["trajectory", "settled"])
def test_present_owner_is_cancelled_if_an_earlier_one_finishes(placement: Placement, first_word: str) -> None:
    placement.beat(0, newest(), incarnation=2)
    outputs = placement.run()
    assert assigned(outputs) == [("p0.0", 0, 2), ("p0.1", 0, 2)]
    if first_word == "trajectory":
        placement.finish(trajectory(prompt(0), 0, lease=1))
    else:
        placement.write(SETTLED, settled("p0.0", batch=0))
    assert cancelled(placement.run()) == {("p0.0", 0, 2)}
    placement.finish(trajectory(prompt(0), 0, lease=leases(outputs)["p0.0"]))
    assert placement.run() == []


def test_settled_trajectory_is_not_reassigned_before_coverage(placement: Placement) -> None:
    placement.finish(*(trajectory(prompt(0), member, lease=member + 1) for member in (0, 1)))
    placement.write(SETTLED, settled("p0.0", batch=0), settled("p0.1", batch=0))
    placement.run()
    placement.restart()
    placement.beat(0, newest(), incarnation=2)
    assert assigned(placement.run()) == []


def test_finish_is_reread_until_the_trajectory_is_settled(placement: Placement) -> None:
    placement.finish(trajectory(prompt(0), 0, lease=1))
    placement.run()
    assert low_water(placement, PartitionKey(TRAJECTORIES.short_name, 0)) == 0
    placement.restart()
    placement.beat(0, newest(), incarnation=2)
    assert assigned(placement.run()) == [("p0.1", 0, 2)]
    placement.write(SETTLED, settled("p0.0", batch=0))
    placement.run()
    assert low_water(placement, PartitionKey(TRAJECTORIES.short_name, 0)) == 1


def test_settled_with_an_invalid_id_becomes_a_dead_letter(placement: Placement) -> None:
    placement.write(SETTLED, settled("rubbish"))
    assert [o.topic for o in placement.run()] == [DEAD_LETTERS]


def test_assignment_with_an_unminted_lease_is_rejected(placement: Placement) -> None:
    forged = Assignment(prompt(0), 0, 99, 1, 3, 1, None, None, 0)
    placement.log.append(INBOX, forged, partition=3)
    placement.restart()
    placement.beat(0, newest())
    outputs = placement.run()
    assert [o.record.reason for o in outputs] == ["p0.0: lease 99 was never minted, the last is 2"]
    placement.beat(1, newest())
    placement.beat(0, newest(), state="stopped")
    assert {name for name, _, _ in assigned(placement.run())} == {"p0.0", "p0.1"}


def test_second_finish_is_ignored(placement: Placement) -> None:
    placement.finish(trajectory(prompt(0), 0, lease=1), trajectory(prompt(0), 0, lease=1))
    placement.run()
    placement.write(SETTLED, settled("p0.0", batch=0), settled("p0.1", batch=0))
    placement.run()
    placement.finish(trajectory(prompt(0), 0, lease=1))
    assert placement.run() == []
    assert low_water(placement, PartitionKey(TRAJECTORIES.short_name, 0)) == 3


# -- rejections -------------------------------------------------------------------------------------------------------


def refused(name: str, lease: int, retry: bool) -> AssignmentRejected:
    return AssignmentRejected(name, lease, 0, 1, "too long", retry)


def test_group_fails_if_no_replica_can_run_a_member() -> None:
    placement = Placement()
    placement.prompts(0, samples=3)
    first = placement.publish(0)
    placement.beat(0, first, capacity=2)
    placement.beat(1, first, capacity=2)
    lease = leases(placement.run())
    placement.write(PROGRESS, refused("p0.0", lease["p0.0"], retry=False))
    outputs = placement.run()
    assert failed_by_placement(outputs) == dict.fromkeys(("p0.0", "p0.1", "p0.2"), "too long")
    assert cancelled(outputs) == {("p0.1", 0, 1), ("p0.2", 1, 1)}
    placement.write(PROGRESS, refused("p0.1", lease["p0.1"], retry=False))
    assert placement.run() == []


def test_rejected_assignment_is_reassigned_across_a_restart(placement: Placement) -> None:
    placement.beat(0, newest(), capacity=0)
    placement.write(PROGRESS, refused("p0.1", 2, retry=True))
    assert placement.run() == []
    placement.restart()
    placement.beat(0, newest(), capacity=0)
    placement.run()
    placement.beat(0, newest())
    outputs = placement.run()
    assert assigned(outputs) == [("p0.1", 0, 2)]
    assert low_water(placement, PartitionKey(PROGRESS.short_name, 0)) == 1
    placement.restart()
    placement.beat(0, newest())
    assert placement.run() == []


def test_rejection_under_an_old_lease_is_ignored(placement: Placement) -> None:
    placement.write(PROGRESS, refused("p0.0", 0, retry=False), refused("p7.0", 1, retry=False))
    assert placement.run() == []


def test_rejection_under_a_lease_not_in_the_inbox_ends_the_owner(placement: Placement) -> None:
    placement.write(PROGRESS, AssignmentRejected("p0.0", 2, 1, 1, "too large for an inbox", retry=True))
    placement.restart()
    placement.beat(1, newest())
    assert assigned(placement.run()) == [("p0.0", 1, 2)]


def test_rejection_under_an_unknown_lease_is_a_dead_letter(placement: Placement) -> None:
    placement.write(PROGRESS, refused("p0.1", 9, retry=True))
    assert dead_letters(placement.run()) == ["p0.1: lease 9 was never minted, the last is 2"]


# -- placement restarts -----------------------------------------------------------------------------------------------


def test_partly_dispatched_group_continues_after_a_restart() -> None:
    placement = Placement()
    placement.prompts(0, 1, samples=3)
    first = placement.publish(0)
    placement.beat(0, first, capacity=2)
    before = leases(placement.run())
    assert list(before) == ["p0.0", "p0.1"]
    placement.finish(failed(prompt(0, 3), 0))
    placement.write(SETTLED, settled("p0.0", 3, "failed"))
    placement.run()
    placement.restart()
    placement.beat(1, first)
    after = leases(placement.run())
    assert list(after) == ["p0.2", "p1.0", "p1.1", "p1.2"]
    assert min(after.values()) > max(before.values())


def test_uncommitted_assignments_are_dispatched_again() -> None:
    placement = Placement()
    placement.prompts(0)
    first = placement.publish(0)
    placement.beat(0, first)
    lost = placement.shard.turn()
    assert assigned(list(lost)) == BOTH
    placement.restart()
    placement.beat(0, first)
    assert assigned(placement.run()) == BOTH


def test_placement_decides_nothing_before_it_has_caught_up(placement: Placement) -> None:
    placement.finish(trajectory(prompt(0), 0, lease=1))
    placement.restart()
    placement.beat(0, newest(), incarnation=2)
    replicas = [place for place in placement.shard.places if place.topic != TRAJECTORIES.short_name]
    assert placement.shard.turn(only=replicas) == ()
    assert assigned(placement.run()) == [("p0.1", 0, 2)]


def test_silent_replica_with_an_open_transaction_is_fenced(placement: Placement) -> None:
    """A rollout that stops within a transaction keeps later records unread until it is fenced."""
    placement.run()
    placement.finish(trajectory(prompt(0), 0, lease=1))
    placement.restart()
    readable = [place for place in placement.shard.places if place.topic != TRAJECTORIES.short_name]
    for _ in range(2):
        assert placement.shard.turn(only=readable) == ()
        assert placement.fenced == []
        placement.now += TIMEOUT_S / 2
    assert placement.shard.turn(only=readable) == ()
    assert placement.fenced == [0]
    placement.beat(1, newest())
    assert assigned(placement.run()) == [("p0.1", 1, 2)]  # p0.0 had finished: losses wait until all was read


def test_replicas_have_a_timeout_to_report_after_a_restart(placement: Placement) -> None:
    placement.run()
    placement.restart()
    assert placement.run(0.0) == []
    assert placement.run(TIMEOUT_S / 2) == []
    placement.beat(0, newest())
    assert placement.run(TIMEOUT_S / 2) == []
    assert placement.fenced == []


@pytest.mark.parametrize("paused", ["before all was seen", "after"])
def test_pause_after_a_restart_extends_the_timeout(placement: Placement, paused: str) -> None:
    placement.finish(trajectory(prompt(9), 0))
    placement.restart()
    if paused == "after":
        placement.run()
        placement.now += 2 * TIMEOUT_S
    else:
        for _ in range(2):
            placement.now += 2 * TIMEOUT_S
            placement.shard.turn(only=[])
    placement.run()
    assert placement.fenced == []


def test_restart_keeps_the_assignment_with_the_later_lease() -> None:
    placement = Placement()
    placement.prompts(0)
    first = placement.publish(0)
    placement.beat(1, first)
    assert assigned(placement.run()) == [("p0.0", 1, 1), ("p0.1", 1, 1)]
    placement.beat(1, first, state="stopped")
    placement.beat(0, first)
    assert assigned(placement.run()) == [("p0.0", 0, 2), ("p0.1", 0, 2)]
    placement.log.committed(placement.shard.config.group).ledger = {}
    placement.restart()
    placement.beat(1, first, incarnation=2)
    assert assigned(placement.run()) == []


def test_unreported_replica_is_fenced_by_its_process_number() -> None:
    placement = Placement(hosted=2)
    placement.prompts(0, samples=4)
    first = placement.publish(0)
    placement.beat(2, first, capacity=2)
    placement.beat(3, first, capacity=2)
    placement.run()
    placement.restart()
    placement.run()
    placement.beat(0, first)
    placement.run(TIMEOUT_S / 2)
    placement.beat(0, first)
    outputs = placement.run(TIMEOUT_S / 2)
    assert placement.fenced == [1]
    assert assigned(outputs) == [(f"p0.{member}", 0, 2) for member in range(4)]
    placement.beat(2, first)  # the incarnation that was fenced before its first heartbeat
    placement.beat(0, first)
    placement.prompts(1)
    assert assigned(placement.run()) == []
    assert placement.fenced == [1]


def test_prompts_are_reread_only_while_a_sample_waits() -> None:
    placement = Placement(admitted=2)
    placement.prompts(0, 1)
    placement.beat(0, placement.publish(0))
    placement.run()
    assert low_water(placement, PartitionKey(PROMPTS.short_name, 0)) == 1
    placement.write(SETTLED, settled("p0.0", outcome="dropped"), settled("p0.1", outcome="dropped"))
    placement.run()
    assert low_water(placement, PartitionKey(PROMPTS.short_name, 0)) == 2


def test_ledger_is_read_back_from_the_oldest_unreleased_work() -> None:
    placement = Placement()
    first = placement.publish(0)
    for number in range(20):
        placement.prompts(number)
        placement.beat(0, first, capacity=100)
        placement.run()
        if number != 15:
            placement.write(
                SETTLED, settled(f"p{number}.0", outcome="dropped"), settled(f"p{number}.1", outcome="dropped")
            )
    placement.run()
    placement.run()
    placement.restart()
    restored = placement.shard.restored
    assert restored is not None
    known = {r.record.trajectory_id for r in restored.ledger if isinstance(r.record, Assignment)}
    assert {"p15.0", "p15.1"} <= known
    assert not {"p0.0", "p13.0"} & known
