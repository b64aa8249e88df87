"""The only replica gets its next batch before it is empty, and starts it under newer weights."""

from __future__ import annotations

from placement_harness import Placement, assigned, leases, names, progress
from record_factories import prompt, trajectory, version

from schemas.records import Assignment, PolicyVersion
from schemas.topics import PROGRESS


def one_behind() -> tuple[Placement, PolicyVersion]:
    """The only replica has a batch of four under version 0; version 1, which is returned, has just been published."""
    placement = Placement(admitted=100)
    placement.prompts(*range(20))
    placement.beat(0, placement.publish(0))
    assert len(names(placement.run())) == 4
    return placement, placement.publish(1)


def test_only_replica_gets_its_next_batch_before_it_is_empty() -> None:
    placement, new = one_behind()
    ahead = [each.record for each in placement.run() if isinstance(each.record, Assignment)]
    assert [each.at_least for each in ahead] == [new] * 4
    placement.publish(2)
    assert names(placement.run()) == []  # one batch, whatever is published meanwhile
    placement.finish(*(trajectory(prompt(n), m) for n in (0, 1) for m in (0, 1)))
    assert names(placement.run()) == []
    placement.beat(0, placement.publish(3))
    assert names(placement.run()) == []  # the batch counts under the version with which it starts


def test_restart_gives_no_third_batch_to_the_only_replica() -> None:
    placement, _ = one_behind()
    assert len(names(placement.run())) == 4
    placement.restart()
    placement.beat(0, version(0))
    assert names(placement.run()) == []


def test_no_batch_is_assigned_early_while_evaluation_waits() -> None:
    placement, _ = one_behind()
    placement.questions(0, under=version(5))
    assert names(placement.run()) == []


def test_lost_trajectories_resume_before_an_early_batch() -> None:
    placement = Placement(admitted=100)
    placement.prompts(*range(20))
    old = placement.publish(0)
    placement.beat(0, old)
    placement.beat(1, old)
    outputs = placement.run()
    at_lost = {name: lease for name, lease in leases(outputs).items() if (name, 1, 1) in assigned(outputs)}
    at_only = {name: lease for name, lease in leases(outputs).items() if name not in at_lost}
    placement.write(PROGRESS, *(progress(name, [5, 6], lease, replica=1) for name, lease in at_lost.items()))
    placement.publish(1)
    placement.beat(1, old, state="stopped")
    assert names(placement.run()) == []  # the only replica stays free for the lost ones
    ended = [(name.split("."), lease) for name, lease in at_only.items()]
    placement.finish(*(trajectory(prompt(int(p[1:])), int(m), lease=lease) for (p, m), lease in ended))
    assert set(at_lost) <= set(names(placement.run()))
