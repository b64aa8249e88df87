"""Dispatch: credit, versions, admission, and evaluation beside training."""

from __future__ import annotations

import pytest
from placement_harness import Placement, assigned, cancelled, leases, names, newest
from record_factories import prompt, settled, trajectory, version

from schemas.records import Assignment, PolicyVersion, Trajectory
from schemas.topics import SETTLED


@pytest.mark.parametrize(
    ("capacity", "prefetch", "replica_batch", "expected"),
    [
        (4, 0, None, 4),
        (4, 0, 8, 4),
        (4, 1, 8, 5),
        (4, 2, None, 4),
        (4, 0, 3, 3),
        (10, 0, None, 6),
        (0, 0, None, 0),
        (4, None, None, 4),
        (4, None, 5, 5),
        (4, None, 3, 3),
    ],
)
def test_dispatch_fills_the_room_of_a_replica(
    capacity: int, prefetch: int | None, replica_batch: int | None, expected: int
) -> None:
    placement = Placement(prefetch=prefetch, replica_batch=replica_batch)
    placement.prompts(0, 1, 2)
    placement.beat(0, placement.publish(0), capacity=capacity)
    assert len(names(placement.run())) == expected
    assert names(placement.run()) == []


@pytest.mark.parametrize(("schedule", "needed"), [("laminar", True), ("partial_rollout", False)])
def test_fresh_work_needs_the_version_that_its_replica_reported(schedule: str, needed: bool) -> None:
    placement = Placement(schedule=schedule)
    placement.prompts(0, samples=1)
    newest = placement.publish(1)
    placement.beat(0, newest)
    (given,) = [each.record for each in placement.run() if isinstance(each.record, Assignment)]
    assert (given.policy_version, given.at_least) == (None, newest if needed else None)


def test_dispatch_splits_a_group_over_replicas_if_needed() -> None:
    placement = Placement()
    placement.prompts(0, samples=6)
    first = placement.publish(0)
    placement.beat(0, first)
    placement.beat(1, first)
    assert [(name, replica) for name, replica, _ in assigned(placement.run())] == [
        *((f"p0.{member}", 0) for member in range(4)),
        *((f"p0.{member}", 1) for member in (4, 5)),
    ]


def test_dispatch_assigns_groups_to_the_least_loaded_replica() -> None:
    placement = Placement(admitted=8)
    placement.prompts(*range(9), samples=2)
    first = placement.publish(0)
    for replica in range(3):
        placement.beat(replica, first, capacity=50)
    placement.run()
    placement.beat(3, first, capacity=50)
    placement.finish(trajectory(prompt(0), 0), trajectory(prompt(1), 0))
    placement.write(SETTLED, *(settled(f"p{n}.{m}", outcome="dropped") for n in (0, 1) for m in (0, 1)))
    given = assigned(placement.run())
    assert [(name, replica) for name, replica, _ in given] == [("p4.0", 1), ("p4.1", 1), ("p5.0", 3), ("p5.1", 3)]


@pytest.mark.parametrize(("prefetch", "expected"), [(0, 1), (3, 4), (None, 10)])
def test_dispatch_prefetches_beyond_the_kv_of_a_replica(prefetch: int | None, expected: int) -> None:
    placement = Placement(prefetch=prefetch)
    placement.prompts(0, samples=1)
    first = placement.publish(0)
    placement.beat(0, first, capacity=10, kv_capacity=2)
    assert names(placement.run()) == ["p0.0"]
    placement.finish(trajectory(prompt(0, 1), 0))  # longer than half of the KV
    placement.prompts(*range(1, 9))
    assert len(names(placement.run())) == expected


def test_dispatch_estimates_kv_by_training_lengths_alone() -> None:
    """Held-out answers may be much longer or shorter than those of the prompts that training draws."""
    placement = Placement(prefetch=0)
    first = placement.publish(0)
    placement.questions(0, under=first)
    placement.beat(0, first, capacity=10, kv_capacity=2)
    assert names(placement.run()) == ["e0.0"]
    placement.finish(trajectory(prompt(0, 1, purpose="evaluation", policy_version=first), 0))  # over half of the KV
    placement.prompts(*range(1, 9))
    assert len(names(placement.run())) == 10


@pytest.mark.parametrize("state", ["starting", "loading", "stopped"])
def test_dispatch_skips_replicas_that_are_not_running(state: str) -> None:
    placement = Placement()
    placement.prompts(0)
    placement.beat(0, placement.publish(0), state=state)
    assert placement.run() == []


def test_dispatch_gives_no_fresh_work_under_older_weights() -> None:
    placement = Placement()
    placement.prompts(*range(9))
    old = placement.publish(0)
    placement.beat(1, old, capacity=0)
    placement.beat(0, old)
    assert len(names(placement.run())) == 4
    new = placement.publish(1)
    placement.finish(*(trajectory(prompt(n), m) for n in (0, 1) for m in (0, 1)))
    placement.beat(0, old)
    assert names(placement.run()) == []
    placement.beat(0, new)
    assert len(names(placement.run())) == 4


def test_dispatch_begins_a_batch_once_the_last_has_drained() -> None:
    placement = Placement()
    placement.prompts(*range(9))
    placement.beat(0, placement.publish(0))
    placement.run()
    placement.finish(trajectory(prompt(0), 0))
    assert names(placement.run()) == []
    placement.finish(*(trajectory(prompt(n), m) for n, m in ((0, 1), (1, 0), (1, 1))))
    assert len(names(placement.run())) == 4


def test_replica_batch_is_kept_across_a_restart() -> None:
    placement = Placement(replica_batch=3)
    placement.prompts(*range(9))
    first = placement.publish(0)
    placement.beat(0, first)
    assert len(names(placement.run())) == 3
    placement.restart()
    placement.beat(0, first)
    assert names(placement.run()) == []


@pytest.mark.parametrize(
    ("admitted", "samples", "expected"),
    [(4, 2, 4), (5, 2, 6), (1, 2, 2), (2, 6, 6), (8, 2, 8)],
)
def test_admission_takes_whole_groups_while_there_is_room(admitted: int, samples: int, expected: int) -> None:
    placement = Placement(admitted=admitted)
    placement.prompts(*range(9), samples=samples)
    placement.beat(0, placement.publish(0), capacity=50)
    assert len(names(placement.run())) == expected


def with_a_batch() -> Placement:
    """As many trajectories as are admitted, all batched."""
    placement = Placement(admitted=4)
    placement.prompts(*range(9))
    placement.beat(0, placement.publish(0), capacity=50)
    placement.run()
    placement.finish(*(trajectory(prompt(n), m) for n in (0, 1) for m in (0, 1)))
    placement.write(SETTLED, *(settled(f"p{n}.{m}", batch=0) for n in (0, 1) for m in (0, 1)))
    return placement


def test_admission_frees_batched_work_once_a_version_covers_it() -> None:
    placement = with_a_batch()
    assert names(placement.run()) == []
    placement.beat(0, placement.publish(1, 0), capacity=50)
    assert len(names(placement.run())) == 4


@pytest.mark.parametrize("outcome", ["dropped", "failed", "imported"])
def test_admission_frees_unbatched_work_at_once(outcome: str) -> None:
    placement = Placement(admitted=2)
    placement.prompts(*range(9))
    placement.beat(0, placement.publish(0), capacity=50)
    placement.run()
    placement.write(SETTLED, settled("p0.0", outcome=outcome), settled("p0.1", outcome=outcome))
    assert names(placement.run()) == ["p1.0", "p1.1"]


def test_admission_bound_holds_across_a_restart() -> None:
    placement = with_a_batch()
    placement.run()
    placement.restart()
    placement.beat(0, newest(), capacity=50)
    assert names(placement.run()) == []
    placement.beat(0, placement.publish(1, 0), capacity=50)
    assert len(names(placement.run())) == 4


def test_dispatch_gives_no_training_work_after_the_final_version() -> None:
    placement = Placement()
    placement.prompts(0)
    last = placement.publish(5, final=True)
    placement.questions(0, under=last)
    placement.beat(0, last)
    assert names(placement.run()) == ["e0.0"]


def test_dispatch_continues_after_the_final_version_of_a_goal() -> None:
    placement = Placement(goal=8)
    placement.prompts(0)
    placement.beat(0, placement.publish(5, final=True))
    assert names(placement.run()) == ["p0.0", "p0.1"]
    placement.prompts(1)
    placement.restart()
    placement.beat(0, placement.publish(8, final=True), incarnation=2)
    assert names(placement.run()) == []


def test_evaluation_runs_beside_training_under_its_version() -> None:
    placement = Placement()
    placement.prompts(0, 1)
    first = placement.publish(0)
    placement.beat(0, first)
    placement.run()
    placement.questions(0, under=first)
    assert assigned(placement.run()) == [("e0.0", 0, 1)]


def test_evaluation_of_an_older_version_waits_for_idle_replicas() -> None:
    placement = Placement()
    old, new = placement.publish(0), placement.publish(1)
    placement.prompts(0)
    placement.beat(0, new)
    assert names(placement.run()) == ["p0.0", "p0.1"]
    placement.questions(0, 1, under=old)
    placement.prompts(1)
    assert [name for name in names(placement.run()) if name.startswith("e")] == []
    placement.finish(*(trajectory(prompt(n), m, under=new) for n in (0, 1) for m in (0, 1)))
    assert names(placement.run()) == ["e0.0", "e1.0"]
    placement.prompts(2)
    assert names(placement.run()) == []
    placement.finish(
        *(trajectory(prompt(n, 1, purpose="evaluation", policy_version=old), 0, under=old) for n in (0, 1))
    )
    placement.beat(0, new)
    assert names(placement.run()) == ["p2.0", "p2.1"]


def test_training_and_evaluation_of_an_older_version_take_turns() -> None:
    placement = Placement()
    old, newest = placement.publish(0), 1
    placement.questions(*range(10), under=old)
    new = placement.publish(newest)
    placement.prompts(*range(20))
    placement.beat(0, old)
    turns, answered = [], 0
    while answered < 10:
        given = leases(placement.run())
        turns.append("".join(sorted({name[0] for name in given})) + str(len(given)))
        evaluated = turns[-1].startswith("e")
        under = old if evaluated else new
        answered += len(given) if evaluated else 0
        placement.beat(0, under)
        assert names(placement.run()) == []  # nothing joins the turn of the other
        placement.finish(*(finished(name, lease, under) for name, lease in given.items()))
        placement.beat(0, under)
        if evaluated and answered < 10:  # it drains; without work it loads the newest version
            assert names(placement.run()) == []
            placement.beat(0, new)
    assert turns == ["e4", "p4", "e4", "p4", "e2"]


def finished(name: str, lease: int, under: PolicyVersion) -> Trajectory:
    number, member = map(int, name[1:].split("."))
    if name.startswith("p"):
        return trajectory(prompt(number), member, lease=lease, under=under)
    return trajectory(prompt(number, 1, purpose="evaluation", policy_version=under), 0, lease=lease, under=under)


def test_evaluation_of_an_older_version_needs_no_training_work() -> None:
    placement = Placement()
    old = placement.publish(0)
    placement.questions(*range(6), under=old)
    placement.publish(1)
    placement.beat(0, old)
    given = leases(placement.run())
    assert len(given) == 4
    placement.finish(*(finished(name, lease, old) for name, lease in list(given.items())[:2]))
    placement.beat(0, old)
    assert names(placement.run()) == ["e4.0", "e5.0"]


def test_interrupt_schedule_trains_between_turns_of_evaluation() -> None:
    placement = Placement(schedule="partial_rollout", admitted=1000)
    old = placement.publish(0)
    placement.questions(*range(8), under=old)
    new = placement.publish(1)
    placement.prompts(*range(20))
    placement.beat(0, new)
    turns = []
    for _ in range(4):
        given = leases(placement.run())
        turns.append("".join(sorted({name[0] for name in given})) + str(len(given)))
        under = old if turns[-1] == "e4" else new
        placement.beat(0, under)
        placement.finish(*(finished(name, lease, under) for name, lease in given.items()))
    assert turns == ["e4", "p4", "e4", "p4"]


def test_evaluation_uses_at_most_the_slots() -> None:
    placement = Placement()
    first = placement.publish(0)
    placement.questions(*range(6), under=first)
    placement.beat(0, first)
    assert len(names(placement.run())) == 4
    placement.beat(0, first, state="stopped")
    placement.beat(1, first, capacity=3)
    assert len(names(placement.run())) == 3
    placement.beat(2, first, capacity=3)
    assert names(placement.run()) == ["e3.0", "e4.0", "e5.0"]


def test_lost_evaluation_resumes_only_under_its_version() -> None:
    placement = Placement()
    old, new = placement.publish(0), placement.publish(1)
    placement.questions(0, under=old)
    placement.beat(0, old)
    assert names(placement.run()) == ["e0.0"]
    placement.prompts(0)
    placement.beat(1, new)
    assert names(placement.run()) == ["p0.0", "p0.1"]
    placement.beat(0, old, state="stopped")
    assert names(placement.run()) == []
    placement.beat(2, new)
    assert names(placement.run()) == ["e0.0"]


def test_admission_ignores_batches_covered_before_settling() -> None:
    placement = Placement(admitted=2)
    placement.prompts(*range(3))
    placement.beat(0, placement.publish(0), capacity=50)
    placement.run()
    placement.beat(0, placement.publish(1, 0), capacity=50)
    placement.run()
    placement.write(SETTLED, settled("p0.0", batch=0), settled("p0.1", batch=0))
    assert names(placement.run()) == ["p1.0", "p1.1"]


def test_admission_does_not_count_evaluation() -> None:
    placement = Placement(admitted=2)
    first = placement.publish(0)
    placement.questions(*range(4), under=first)
    placement.prompts(0, 1)
    placement.beat(0, first)
    assert names(placement.run()) == ["e0.0", "e1.0", "e2.0", "e3.0", "p0.0", "p0.1"]


def test_lost_evaluation_does_not_block_other_versions() -> None:
    placement = Placement()
    old, new = placement.publish(0), placement.publish(1)
    placement.questions(*range(4), under=old)
    placement.beat(0, old)
    assert len(names(placement.run())) == 4
    placement.questions(4, under=new)
    placement.beat(0, old, incarnation=2, state="stopped")
    placement.beat(1, new, capacity=2)
    assert names(placement.run()) == ["e0.0", "e1.0"]  # idle, so it loads the version that has waited longest
    placement.beat(2, new, capacity=2, running=0)
    placement.prompts(0)
    assert names(placement.run()) == ["e2.0", "e3.0"]


def test_finished_trajectory_is_not_cancelled_at_its_owner() -> None:
    placement = Placement()
    placement.prompts(0)
    placement.beat(0, placement.publish(0))
    placement.run()
    placement.finish(trajectory(prompt(0), 0, lease=1))
    assert cancelled(placement.run()) == set()


def test_newest_version_is_by_epoch_first() -> None:
    placement = Placement()
    placement.prompts(0)
    placement.publish(9)
    replayed = placement.publish(5, epoch=2)
    placement.beat(1, version(9), capacity=0)
    placement.beat(0, version(9))
    assert placement.run() == []
    placement.beat(0, replayed)
    assert names(placement.run()) == ["p0.0", "p0.1"]
