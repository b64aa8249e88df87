"""Moves: planned, reserved, released, handed over; and what becomes of them when anything dies, ends or is late."""

from __future__ import annotations

import pytest
from placement_harness import TIMEOUT_S, Placement, assigned, cancelled, leases
from record_factories import prompt, trajectory, version
from test_placement_resumes import partials, progress

from operators.io.elements import Output
from schemas.records import (
    Assignment,
    Cancel,
    MoveOutcome,
    NextOwner,
    PlannedMove,
    PolicyVersion,
    Release,
    RepackPlan,
    ReplicaLoad,
    Reserve,
)
from schemas.topics import INBOX, PLANS, PROGRESS

PERIOD_S = 2.0


def of(kind: type, outputs: list[Output]) -> list:
    return [output.record for output in outputs if isinstance(output.record, kind)]


@pytest.fixture
def placement() -> Placement:
    """Two replicas of four slots, both with two trajectories of a batch that was four; the rest has finished."""
    placement = Placement(repack_s=PERIOD_S)
    nearly_done(placement, placement.publish(0), first=0)
    return placement


def nearly_done(placement: Placement, under: PolicyVersion, first: int) -> None:
    """Replicas `first` and the next, of four slots each, have two trajectories under one version; two have finished."""
    both = (first, first + 1)
    placement.prompts(*both, samples=4)
    for replica in both:
        placement.beat(replica, under)
    given = leases(placement.run())
    for number in both:
        placement.finish(*(trajectory(prompt(number, 4), m, lease=given[f"p{number}.{m}"]) for m in (0, 1)))
    placement.run()


def ended(outputs: list[Output], plan_id: str = "1-1") -> dict[str, tuple[str, ...]]:
    """What became of the move from replica 0 to 1 of a plan, which is told once."""
    (end,) = of(MoveOutcome, outputs)
    assert (end.plan_id, end.source, end.destination) == (plan_id, 0, 1)
    outcomes = {outcome: getattr(end, outcome) for outcome in ("handed_over", "finished", "rejected", "lost")}
    return {outcome: names for outcome, names in outcomes.items() if names}


def beat(placement: Placement, reserved: str = "", **changes: object) -> None:
    placement.beat(0, version(0), running=2, kv_used=10, **changes)
    plans = (reserved,) if reserved else ()
    placement.beat(1, version(0), running=2, kv_used=20, reserved=plans)


def planned(placement: Placement) -> list[Output]:
    beat(placement)
    return placement.run(PERIOD_S)


def released(placement: Placement) -> Release:
    (reserve,) = of(Reserve, planned(placement))
    beat(placement, reserve.plan_id)
    (order,) = of(Release, placement.run())
    return order


def hand_over(placement: Placement, order: Release, *, told: bool = True) -> None:
    """What replica 0 writes in one transaction; placement reads of it what it is `told`."""
    for name, lease in zip(order.trajectory_ids, order.leases, strict=True):
        asked, member = prompt(0, 4), int(name[-1])
        gained = progress(name, [7], member + 1, next_owner=NextOwner(lease, 1, 1))
        spans = gained.version_spans
        record = Assignment(asked, member, lease, 1, 1, 1, version(0), gained.gained, 0, spans)
        placement.log.append(INBOX, record, partition=1)
        if told:
            placement.tell(PROGRESS, gained)


def test_what_a_replica_was_given_since_its_heartbeat_counts(placement: Placement) -> None:
    placement.beat(0, version(0), running=2, kv_used=10)
    placement.beat(1, version(0), running=0, kv_used=0)  # it has only begun: not one that is nearly done
    assert of(RepackPlan, placement.run(PERIOD_S)) == []
    placement.beat(1, version(0), running=1, kv_used=10)
    (plan,) = of(RepackPlan, placement.run(PERIOD_S))
    each = len(prompt(0).token_ids) + len(trajectory(prompt(0), 0).response.token_ids) / 2
    assert ReplicaLoad(1, 10 + int(each), 100, 2) in plan.before


def test_room_is_reserved_before_anything_is_let_go(placement: Placement) -> None:
    outputs = planned(placement)
    names = ("p0.2", "p0.3")
    assert of(Reserve, outputs) == [Reserve("1-1.1", version(0), names, 10, 1, 1)]
    assert of(RepackPlan, outputs) == [
        RepackPlan(
            plan_id="1-1",
            policy_version=version(0),
            moves=(PlannedMove(0, 1, names, 10),),
            before=(ReplicaLoad(0, 10, 100, 2), ReplicaLoad(1, 20, 100, 2)),
            after=(ReplicaLoad(0, 0, 100, 0), ReplicaLoad(1, 30, 100, 4)),
            reason="repack",
            planned_at=0,
        )
    ]
    assert [output.partition for output in outputs if output.topic is INBOX] == [1]
    assert [output.key for output in outputs if output.topic is PLANS] == ["1-1"]
    beat(placement)
    assert placement.run(PERIOD_S) == []  # nothing moves, and nothing is planned over, before room is kept
    beat(placement, "1-1.1")
    outputs = placement.run()
    assert of(Release, outputs) == [Release("1-1.1", names, (9, 10), 1, 1, 0, 1)]
    assert [output.partition for output in outputs] == [0]
    beat(placement, "1-1.1")
    assert placement.run(PERIOD_S) == []


def test_the_source_owns_until_the_hand_over_and_the_destination_after(placement: Placement) -> None:
    order = released(placement)
    hand_over(placement, order)
    beat(placement)
    outputs = placement.run()
    assert of(Assignment, outputs) == []
    assert ended(outputs) == {"handed_over": ("p0.2", "p0.3")}
    placement.beat(1, version(0), incarnation=2)
    placement.beat(2, version(0))
    outputs = placement.run()
    assert {name: tokens for name, (tokens, _) in partials(outputs).items() if name < "p1"} == {
        "p0.2": [7],
        "p0.3": [7],
    }
    assert min(leases(outputs).values()) > max(order.leases)


@pytest.mark.parametrize("told", [False, True])
def test_a_hand_over_is_known_after_a_restart(placement: Placement, told: bool) -> None:
    order = released(placement)
    hand_over(placement, order, told=told)
    if told:
        placement.run()
    placement.restart()
    beat(placement)
    assert of(Assignment, placement.run()) == []
    placement.beat(0, version(0), state="stopped")
    assert assigned(placement.run()) == []  # what it had is with replica 1
    placement.beat(2, version(0))
    placement.beat(1, version(0), state="stopped")
    assert {name for name, _, _ in assigned(placement.run())} == {"p0.2", "p0.3", "p1.2", "p1.3"}


def test_a_release_that_was_not_obeyed_yet_is_known_after_a_restart(placement: Placement) -> None:
    order = released(placement)
    placement.restart()
    beat(placement)
    assert of(Assignment, placement.run()) == []
    placement.finish(trajectory(prompt(0, 4), 2, lease=3))
    assert cancelled(placement.run()) == {("p0.2", 1, 1)}  # replica 1 waits for it in vain
    hand_over(placement, order)
    assert ended(placement.run()) == {"handed_over": ("p0.3",), "finished": ("p0.2",)}
    placement.beat(0, version(0), state="stopped")
    assert assigned(placement.run()) == []


def test_what_finishes_before_its_release_stays_finished(placement: Placement) -> None:
    (reserve,) = of(Reserve, planned(placement))
    placement.finish(trajectory(prompt(0, 4), 2, lease=3))
    beat(placement, reserve.plan_id)
    outputs = placement.run()
    assert [order.trajectory_ids for order in of(Release, outputs)] == [("p0.3",)]
    assert cancelled(outputs) == {("p0.2", 1, 1)}


def test_a_plan_of_which_all_has_finished_is_dropped(placement: Placement) -> None:
    (reserve,) = of(Reserve, planned(placement))
    placement.finish(*(trajectory(prompt(0, 4), m, lease=m + 1) for m in (2, 3)))
    beat(placement, reserve.plan_id)
    outputs = placement.run()
    assert of(Release, outputs) == []
    assert ended(outputs) == {"finished": ("p0.2", "p0.3")}
    assert cancelled(outputs) == {("p0.2", 1, 1), ("p0.3", 1, 1)}


def test_what_finishes_on_its_way_is_not_waited_for(placement: Placement) -> None:
    order = released(placement)
    placement.finish(*(trajectory(prompt(0, 4), m, lease=m + 1) for m in (2, 3)))
    assert cancelled(placement.run()) == {(name, 1, 1) for name in order.trajectory_ids}


def test_a_destination_that_keeps_no_room_is_not_waited_for_for_ever(placement: Placement) -> None:
    planned(placement)
    for _ in range(3):
        beat(placement)
        outputs = placement.run(TIMEOUT_S / 2 - 1)
        assert of(Release, outputs) == []
    assert cancelled(outputs) == {("p0.2", 1, 1), ("p0.3", 1, 1)}
    kinds = [type(output.record) for output in outputs]
    assert kinds == [Cancel, Reserve, RepackPlan, MoveOutcome]  # another is tried; the first one's end does not end it
    assert ended(outputs) == {"refused": ("p0.2", "p0.3")}


@pytest.mark.parametrize("restarted", [False, True])
def test_what_is_handed_over_late_stays_with_its_new_owner(placement: Placement, restarted: bool) -> None:
    order = released(placement)
    if restarted:
        placement.restart()
    outputs: list[Output] = []
    while not of(Cancel, outputs):
        beat(placement)
        outputs = placement.run(TIMEOUT_S / 2 - 1)
    (called_off,) = of(Cancel, outputs)
    assert (called_off.trajectory_ids, called_off.leases) == (("p0.2", "p0.3"), (0, 0))
    assert ended(outputs) == {"refused": order.trajectory_ids}
    (reserve,) = of(Reserve, outputs)  # the same move is planned again, and now the first one is made
    hand_over(placement, order)
    beat(placement, reserve.plan_id)
    outputs = placement.run()
    assert of(Release, outputs) == []
    assert ended(outputs, reserve.plan_id.rpartition(".")[0]) == {"handed_over": order.trajectory_ids}
    assert all(set(cancel.leases) == {0} for cancel in of(Cancel, outputs))
    placement.beat(0, version(0), state="stopped")
    assert assigned(placement.run()) == []
    placement.beat(2, version(0))
    placement.beat(1, version(0), state="stopped")
    assert {name for name, _, _ in assigned(placement.run())} == {"p0.2", "p0.3", "p1.2", "p1.3"}


def test_who_waits_for_a_source_that_died_is_told(placement: Placement) -> None:
    released(placement)
    placement.beat(0, version(0), state="stopped")
    outputs = placement.run()
    assert cancelled(outputs) == {("p0.2", 1, 1), ("p0.3", 1, 1)}
    assert ended(outputs) == {"lost": ("p0.2", "p0.3")}


def test_what_finishes_where_it_was_to_go_has_moved(placement: Placement) -> None:
    """The word of its end comes before that of its hand-over: nothing orders the two."""
    order = released(placement)
    first, second = order.leases
    placement.finish(trajectory(prompt(0, 4), 2, lease=first), trajectory(prompt(0, 4), 3, lease=4))
    assert ended(placement.run()) == {"handed_over": ("p0.2",), "finished": ("p0.3",)}
    hand_over(placement, order)
    assert of(MoveOutcome, placement.run()) == []
    assert second > first


def test_the_next_owner_of_what_has_ended_is_told_to_stop(placement: Placement) -> None:
    order = released(placement)
    placement.finish(*(trajectory(prompt(0, 4), m, lease=m + 1) for m in (2, 3)))
    placement.run()
    hand_over(placement, order)
    (cancel,) = of(Cancel, placement.run())
    assert dict(zip(cancel.trajectory_ids, cancel.leases, strict=True)) == dict(
        zip(order.trajectory_ids, order.leases, strict=True)
    )


@pytest.mark.parametrize("who", [0, 1])
def test_who_dies_before_the_release_moves_nothing(placement: Placement, who: int) -> None:
    planned(placement)
    placement.beat(who, version(0), incarnation=2)
    outputs = placement.run()
    assert of(Release, outputs) == []
    assert ended(outputs) == {"lost": ("p0.2", "p0.3")}
    names = {"p0.2", "p0.3"} if who == 0 else {"p1.2", "p1.3"}
    assert {name for name, _, _ in assigned(outputs)} == names


def test_a_hand_over_to_a_life_that_is_over_goes_on_elsewhere(placement: Placement) -> None:
    order = released(placement)
    placement.beat(1, version(0), incarnation=2, capacity=2)
    placement.run()
    hand_over(placement, order)
    placement.beat(2, version(0))
    assert {name for name, _, _ in assigned(placement.run())} == {"p0.2", "p0.3"}


def test_a_source_that_was_given_up_hands_over_too_late(placement: Placement) -> None:
    order = released(placement)
    placement.beat(2, version(0))
    placement.beat(0, version(0), state="stopped")
    outputs = placement.run()
    assert {name for name, _, _ in assigned(outputs)} == {"p0.2", "p0.3"}
    hand_over(placement, order)  # committed before it was fenced, read after
    assert cancelled(placement.run()) == {("p0.2", 1, 1), ("p0.3", 1, 1)}


def test_no_fresh_work_goes_where_trajectories_come_or_go(placement: Placement) -> None:
    placement.prompts(2)
    placement.publish(0)
    planned(placement)
    placement.prompts(3, 4)
    beat(placement)
    assert assigned(placement.run()) == []


def test_a_plan_is_of_replicas_under_one_version(placement: Placement) -> None:
    """Both under the older version fit on either of the newer one, which have more room."""
    older, newer = version(0), version(1)
    nearly_done(placement, placement.publish(1), first=2)
    for replica, under in enumerate((older, older, newer, newer)):
        placement.beat(replica, under, running=2, kv_used=(30, 40, 10, 20)[replica])
    plans = of(RepackPlan, placement.run(PERIOD_S))
    moved = {plan.policy_version: [(move.source, move.destination) for move in plan.moves] for plan in plans}
    assert moved == {older: [(0, 1)], newer: [(2, 3)]}
    touched = {plan.policy_version: {load.replica for load in plan.before} for plan in plans}
    assert touched == {older: {0, 1}, newer: {2, 3}}


def test_plans_follow_a_global_batch_at_once_and_otherwise_the_clock(placement: Placement) -> None:
    beat(placement)
    assert of(Reserve, placement.run(PERIOD_S / 4)) == []
    placement.publish(1, 0)
    assert of(Reserve, placement.run()) != []


@pytest.mark.parametrize("changes", [{"repack": False}, {"schedule": "partial_rollout"}])
def test_without_repack_nothing_moves(changes: dict) -> None:
    placement = Placement(repack_s=PERIOD_S, **changes)
    placement.prompts(0, 1, samples=2)
    first = placement.publish(0)
    placement.beat(0, first, capacity=2)
    placement.beat(1, first, capacity=2)
    placement.run()
    beat(placement)
    assert placement.run(PERIOD_S) == []


# -- draining ---------------------------------------------------------------------------------------------------------


def test_a_draining_replica_gets_nothing_and_gives_what_fits() -> None:
    placement = Placement(repack=False)
    placement.prompts(0, samples=3)
    first = placement.publish(0)
    placement.beat(0, first)
    placement.run()
    placement.prompts(1)
    placement.beat(0, first, state="draining", running=3, kv_used=9)
    placement.beat(1, first, capacity=2)
    outputs = placement.run(PERIOD_S)
    (plan,) = of(RepackPlan, outputs)
    assert plan.reason == "drain"
    assert plan.moves == (PlannedMove(0, 1, ("p0.0", "p0.1"), 6),)
    assert assigned(outputs) == []


# -- queues -----------------------------------------------------------------------------------------------------------


def test_a_replica_for_which_there_is_nothing_fresh_takes_of_a_queue() -> None:
    placement = Placement(repack_s=PERIOD_S)
    placement.prompts(0, samples=8)
    placement.beat(0, placement.publish(0), capacity=8)
    given = leases(placement.run())
    placement.finish(trajectory(prompt(0, 8), 0, lease=given["p0.0"]))
    placement.beat(0, version(0), capacity=8, running=2, waiting=5, kv_used=90)
    placement.run()
    placement.beat(0, version(0), capacity=8, running=2, waiting=5, kv_used=90)
    placement.beat(1, version(0), capacity=8)  # it joins
    outputs = placement.run(PERIOD_S)
    (plan,) = of(RepackPlan, outputs)
    assert plan.reason == "balance"
    assert plan.moves == (PlannedMove(0, 1, ("p0.4", "p0.5", "p0.6", "p0.7"), 0),)
    (reserve,) = of(Reserve, outputs)
    assert (reserve.replica, reserve.kv_tokens) == (1, 0)
    placement.prompts(1, samples=2)
    placement.beat(1, version(0), capacity=8, reserved=(reserve.plan_id,))
    assert of(Release, placement.run())
    assert placement.fenced == []


# -- bad input --------------------------------------------------------------------------------------------------------


def test_clocks_that_jump_change_nothing(placement: Placement) -> None:
    beat(placement, sent_at=-(10**15))
    placement.now -= 10**6  # placement's own, too
    beat(placement, sent_at=10**15)
    placement.run()
    assert placement.fenced == []
    beat(placement)
    placement.now += 10**7
    assert of(Assignment, placement.run()) == []
    assert placement.fenced == []
