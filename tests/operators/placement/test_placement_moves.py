"""Moves: planned, reserved, released, handed over; and their outcomes after failures, finishes and delays."""

from __future__ import annotations

import pytest
from placement_harness import TIMEOUT_S, Placement, assigned, cancelled, leases, partials, progress, with_requests
from record_factories import prompt, trajectory, version

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
    """Two replicas of four slots, each with two unfinished trajectories of a batch of four."""
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
    """The outcomes of the move from replica 0 to 1 of a plan, which are reported once."""
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


def hand_over(placement: Placement, order: Release, *, with_progress: bool = True) -> None:
    """The transaction of replica 0; placement reads its Progress only if `with_progress`."""
    for name, lease in zip(order.trajectory_ids, order.leases, strict=True):
        asked, member = prompt(0, 4), int(name[-1])
        gained = progress(name, [7], member + 1, next_owner=NextOwner(lease, 1, 1))
        spans = gained.version_spans
        record = Assignment(asked, member, lease, 1, 1, 1, version(0), gained.gained, 0, spans)
        placement.log.append(INBOX, record, partition=1)
        if with_progress:
            placement.write(PROGRESS, gained)


def test_load_counts_requests_assigned_since_the_heartbeat(placement: Placement) -> None:
    placement.beat(0, version(0), running=2, kv_used=10)
    placement.beat(1, version(0), running=0, kv_used=0)  # it has just started, so it is not nearly done
    assert of(RepackPlan, placement.run(PERIOD_S)) == []
    placement.beat(1, version(0), running=1, kv_used=10)
    (plan,) = of(RepackPlan, placement.run(PERIOD_S))
    each = len(prompt(0).token_ids) + len(trajectory(prompt(0), 0).response.token_ids) / 2
    assert ReplicaLoad(1, 10 + int(each), 100, 2) in plan.before


def test_move_reserves_room_before_the_release(placement: Placement) -> None:
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
    assert placement.run(PERIOD_S) == []  # nothing moves and no new plan is made before room is reserved
    beat(placement, "1-1.1")
    outputs = placement.run()
    assert of(Release, outputs) == [Release("1-1.1", names, (9, 10), 1, 1, 0, 1)]
    assert [output.partition for output in outputs] == [0]
    beat(placement, "1-1.1")
    assert placement.run(PERIOD_S) == []


def test_move_is_without_kv_that_cannot_be_fetched(placement: Placement) -> None:
    planned(placement)
    placement.beat(0, version(0), running=2, kv_used=10, kv_address="h0:7401")
    placement.beat(1, version(0), reserved=("1-1.1",), unreachable=("h0:7401",))
    assert [order.without_kv for order in of(Release, placement.run())] == [True]


def test_move_changes_the_owner_at_the_hand_over(placement: Placement) -> None:
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


@pytest.mark.parametrize("with_progress", [False, True])
def test_hand_over_is_restored_after_a_restart(placement: Placement, with_progress: bool) -> None:
    order = released(placement)
    hand_over(placement, order, with_progress=with_progress)
    if with_progress:
        placement.run()
    placement.restart()
    beat(placement)
    assert of(Assignment, placement.run()) == []
    placement.beat(0, version(0), state="stopped")
    assert assigned(placement.run()) == []  # replica 1 owns its trajectories
    placement.beat(2, version(0))
    placement.beat(1, version(0), state="stopped")
    assert {name for name, _, _ in assigned(placement.run())} == {"p0.2", "p0.3", "p1.2", "p1.3"}


def test_open_release_is_restored_after_a_restart(placement: Placement) -> None:
    order = released(placement)
    placement.restart()
    beat(placement)
    assert of(Assignment, placement.run()) == []
    placement.finish(trajectory(prompt(0, 4), 2, lease=3))
    assert cancelled(placement.run()) == {("p0.2", 1, 1)}  # replica 1 expects it
    hand_over(placement, order)
    assert ended(placement.run()) == {"handed_over": ("p0.3",), "finished": ("p0.2",)}
    placement.beat(0, version(0), state="stopped")
    assert assigned(placement.run()) == []


def test_move_omits_trajectories_that_finished_before_release(placement: Placement) -> None:
    (reserve,) = of(Reserve, planned(placement))
    placement.finish(trajectory(prompt(0, 4), 2, lease=3))
    beat(placement, reserve.plan_id)
    outputs = placement.run()
    assert [order.trajectory_ids for order in of(Release, outputs)] == [("p0.3",)]
    assert cancelled(outputs) == {("p0.2", 1, 1)}


def test_move_is_dropped_if_all_trajectories_finished(placement: Placement) -> None:
    (reserve,) = of(Reserve, planned(placement))
    placement.finish(*(trajectory(prompt(0, 4), m, lease=m + 1) for m in (2, 3)))
    beat(placement, reserve.plan_id)
    outputs = placement.run()
    assert of(Release, outputs) == []
    assert ended(outputs) == {"finished": ("p0.2", "p0.3")}
    assert cancelled(outputs) == {("p0.2", 1, 1), ("p0.3", 1, 1)}


def test_move_cancels_trajectories_that_finish_at_the_source(placement: Placement) -> None:
    order = released(placement)
    placement.finish(*(trajectory(prompt(0, 4), m, lease=m + 1) for m in (2, 3)))
    assert cancelled(placement.run()) == {(name, 1, 1) for name in order.trajectory_ids}


def test_move_is_rejected_if_no_room_is_reserved_in_time(placement: Placement) -> None:
    planned(placement)
    for _ in range(3):
        beat(placement)
        outputs = placement.run(TIMEOUT_S / 2 - 1)
        assert of(Release, outputs) == []
    assert cancelled(outputs) == {("p0.2", 1, 1), ("p0.3", 1, 1)}
    kinds = [type(output.record) for output in outputs]
    assert kinds == [
        Cancel,
        Reserve,
        RepackPlan,
        MoveOutcome,
    ]  # another plan follows; the outcome of the first does not end it
    assert ended(outputs) == {"rejected": ("p0.2", "p0.3")}


@pytest.mark.parametrize("restarted", [False, True])
def test_late_hand_over_still_changes_the_owner(placement: Placement, restarted: bool) -> None:
    order = released(placement)
    if restarted:
        placement.restart()
    outputs: list[Output] = []
    while not of(Cancel, outputs):
        beat(placement)
        outputs = placement.run(TIMEOUT_S / 2 - 1)
    (cancel_record,) = of(Cancel, outputs)
    assert (cancel_record.trajectory_ids, cancel_record.leases) == (("p0.2", "p0.3"), (0, 0))
    assert ended(outputs) == {"rejected": order.trajectory_ids}
    (reserve,) = of(Reserve, outputs)  # the same move is planned again, then the first hand-over arrives
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


def test_move_is_cancelled_at_the_destination_if_the_source_dies(placement: Placement) -> None:
    released(placement)
    placement.beat(0, version(0), state="stopped")
    outputs = placement.run()
    assert cancelled(outputs) == {("p0.2", 1, 1), ("p0.3", 1, 1)}
    assert ended(outputs) == {"lost": ("p0.2", "p0.3")}


def test_finish_at_the_destination_counts_as_handed_over(placement: Placement) -> None:
    """Its finish is read before its hand-over, since the two topics have no common order."""
    order = released(placement)
    first, second = order.leases
    placement.finish(trajectory(prompt(0, 4), 2, lease=first), trajectory(prompt(0, 4), 3, lease=4))
    assert ended(placement.run()) == {"handed_over": ("p0.2",), "finished": ("p0.3",)}
    hand_over(placement, order)
    assert of(MoveOutcome, placement.run()) == []
    assert second > first


def test_next_owner_of_a_finished_trajectory_is_cancelled(placement: Placement) -> None:
    order = released(placement)
    placement.finish(*(trajectory(prompt(0, 4), m, lease=m + 1) for m in (2, 3)))
    placement.run()
    hand_over(placement, order)
    (cancel,) = of(Cancel, placement.run())
    assert dict(zip(cancel.trajectory_ids, cancel.leases, strict=True)) == dict(
        zip(order.trajectory_ids, order.leases, strict=True)
    )


@pytest.mark.parametrize("who", [0, 1])
def test_move_is_lost_if_either_replica_dies_before_release(placement: Placement, who: int) -> None:
    planned(placement)
    placement.beat(who, version(0), incarnation=2)
    outputs = placement.run()
    assert of(Release, outputs) == []
    assert ended(outputs) == {"lost": ("p0.2", "p0.3")}
    names = {"p0.2", "p0.3"} if who == 0 else {"p1.2", "p1.3"}
    assert {name for name, _, _ in assigned(outputs)} == names


def test_hand_over_to_an_ended_incarnation_is_reassigned(placement: Placement) -> None:
    order = released(placement)
    placement.beat(1, version(0), incarnation=2, capacity=2)
    placement.run()
    hand_over(placement, order)
    placement.beat(2, version(0))
    assert {name for name, _, _ in assigned(placement.run())} == {"p0.2", "p0.3"}


def test_hand_over_of_a_fenced_source_is_cancelled(placement: Placement) -> None:
    order = released(placement)
    placement.beat(2, version(0))
    placement.beat(0, version(0), state="stopped")
    outputs = placement.run()
    assert {name for name, _, _ in assigned(outputs)} == {"p0.2", "p0.3"}
    hand_over(placement, order)  # committed before the fence, read after it
    assert cancelled(placement.run()) == {("p0.2", 1, 1), ("p0.3", 1, 1)}


def test_dispatch_gives_no_fresh_work_to_moving_replicas(placement: Placement) -> None:
    placement.prompts(2)
    placement.publish(0)
    planned(placement)
    placement.prompts(3, 4)
    beat(placement)
    assert assigned(placement.run()) == []


def test_plan_moves_only_between_replicas_of_one_version(placement: Placement) -> None:
    """Replicas of the newer version have more room, but take no trajectories of the older one."""
    older, newer = version(0), version(1)
    nearly_done(placement, placement.publish(1), first=2)
    for replica, under in enumerate((older, older, newer, newer)):
        placement.beat(replica, under, running=2, kv_used=(30, 40, 10, 20)[replica])
    plans = of(RepackPlan, placement.run(PERIOD_S))
    moved = {plan.policy_version: [(move.source, move.destination) for move in plan.moves] for plan in plans}
    assert moved == {older: [(0, 1)], newer: [(2, 3)]}
    involved = {plan.policy_version: {load.replica for load in plan.before} for plan in plans}
    assert involved == {older: {0, 1}, newer: {2, 3}}


def test_plans_are_made_after_a_global_batch_and_periodically(placement: Placement) -> None:
    beat(placement)
    assert of(Reserve, placement.run(PERIOD_S / 4)) == []
    placement.publish(1, 0)
    assert of(Reserve, placement.run()) != []


@pytest.mark.parametrize("changes", [{"repack": False}, {"schedule": "partial_rollout"}])
def test_nothing_moves_without_repack(changes: dict) -> None:
    placement = Placement(repack_s=PERIOD_S, **changes)
    placement.prompts(0, 1, samples=2)
    first = placement.publish(0)
    placement.beat(0, first, capacity=2)
    placement.beat(1, first, capacity=2)
    placement.run()
    beat(placement)
    assert placement.run(PERIOD_S) == []


# -- draining ---------------------------------------------------------------------------------------------------------


def test_draining_replica_gets_no_work_and_gives_what_fits() -> None:
    placement, first = with_requests(3, repack=False), version(0)
    placement.prompts(1)
    placement.beat(0, first, state="draining", running=3, kv_used=9)
    placement.beat(1, first, capacity=2)
    outputs = placement.run(PERIOD_S)
    (plan,) = of(RepackPlan, outputs)
    assert plan.reason == "drain"
    assert plan.moves == (PlannedMove(0, 1, ("p0.0", "p0.1"), 6),)
    assert assigned(outputs) == []


# -- queues -----------------------------------------------------------------------------------------------------------


def test_idle_replica_takes_waiting_requests_of_another() -> None:
    placement = Placement(repack_s=PERIOD_S)
    placement.prompts(0, samples=8)
    placement.beat(0, placement.publish(0), capacity=8)
    given = leases(placement.run())
    placement.finish(trajectory(prompt(0, 8), 0, lease=given["p0.0"]))
    placement.beat(0, version(0), capacity=8, running=2, waiting=5, kv_used=90)
    placement.run()
    placement.beat(0, version(0), capacity=8, running=2, waiting=5, kv_used=90)
    placement.beat(1, version(0), capacity=8)  # a new replica
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


def test_moves_ignore_clock_jumps(placement: Placement) -> None:
    beat(placement, sent_at=-(10**15))
    placement.now -= 10**6  # placement's clock too
    beat(placement, sent_at=10**15)
    placement.run()
    assert placement.fenced == []
    beat(placement)
    placement.now += 10**7
    assert of(Assignment, placement.run()) == []
    assert placement.fenced == []
