"""A replica keeps a trajectory under one version, whatever is announced, named, cancelled or sent twice."""

from __future__ import annotations

from typing import Any

import pytest
from record_factories import prompt, version
from scripted_engine import ScriptedEngine, ScriptedWeights

from operators.rollout.replica import Replica
from schemas.columns import token_ids
from schemas.records import Assignment, AssignmentRejected, PolicyVersion, Trajectory, VersionSpan


def assignment(number: int, under: PolicyVersion | None = None, lease: int = 1, length: int = 3) -> Assignment:
    asked = prompt(number, 1, token_ids=token_ids([1] * length))
    return Assignment(asked, 0, lease, lease, 0, 7, under, None, 0)


class Rig:
    """A replica over an engine that takes `steps` for every request, with weights 0, 1, … up to `held`."""

    def __init__(self, held: int = 1, steps: int = 2, **engine: Any) -> None:
        self.engine = ScriptedEngine(steps=lambda name: steps, **engine)
        self.weights = ScriptedWeights()
        self.replica = Replica(0, 7, self.engine, self.weights, lambda tokens: f"{tokens}", lambda: 42)
        for number in range(held):
            self.publish(number)

    def publish(self, number: int, *, arrived: bool = True) -> PolicyVersion:
        of = version(number)
        if arrived:
            self.weights.add(of)
        self.replica.announce(of)
        return of

    def drain(self, most: int = 50) -> list[Trajectory | AssignmentRejected]:
        found: list[Trajectory | AssignmentRejected] = []
        for _ in range(most):
            found += self.replica.step()
        return found


def test_a_finished_trajectory_says_what_made_it() -> None:
    rig = Rig()
    rig.replica.accept(assignment(3, lease=9))
    (done,) = rig.drain()
    assert isinstance(done, Trajectory)
    assert (done.trajectory_id, done.lease, done.attempt, done.replica, done.incarnation) == ("p3.0", 9, 9, 0, 7)
    assert done.version_spans == (VersionSpan(version(0), 2),)
    assert done.response.token_ids.to_pylist() == [0, 0]
    assert done.response.loss_mask.to_pylist() == [True, True]
    assert (done.text, done.finish_reason, done.newest_version, done.started_at) == ("[0, 0]", "stop", version(0), 42)
    assert not rig.replica.busy()


def test_nothing_starts_before_there_are_weights() -> None:
    rig = Rig(held=0)
    rig.replica.accept(assignment(0))
    assert (rig.drain(), rig.replica.state, rig.replica.busy()) == ([], "starting", False)
    rig.publish(0, arrived=False)
    assert rig.drain() == []
    rig.publish(0)
    assert [done.policy_version for done in rig.drain()] == [version(0)]  # type: ignore[union-attr]
    assert rig.replica.state == "running"


def test_versions_that_nobody_announced_are_not_loaded() -> None:
    rig = Rig()
    rig.weights.add(version(5))
    rig.drain(1)
    assert rig.engine.loads == [version(0)]


def test_weights_change_between_batches_never_within_one() -> None:
    rig = Rig(steps=3)
    rig.replica.accept(assignment(0))
    rig.replica.step()
    rig.publish(1)
    rig.replica.accept(assignment(1))
    done = rig.drain()
    assert [(d.trajectory_id, d.policy_version) for d in done] == [("p0.0", version(0)), ("p1.0", version(0))]  # type: ignore[union-attr]
    assert done[0].newest_version == version(1)  # type: ignore[union-attr]
    assert rig.engine.loads == [version(0), version(1)]


def test_a_named_version_is_loaded_once_the_engine_is_empty_and_left_after() -> None:
    rig = Rig(held=3)
    rig.replica.accept(assignment(0))
    rig.replica.step()
    rig.replica.accept(assignment(1, under=version(1)))
    rig.replica.accept(assignment(2))
    done = {d.trajectory_id: d.policy_version for d in rig.drain()}  # type: ignore[union-attr]
    assert done == {"p0.0": version(2), "p1.0": version(1), "p2.0": version(2)}
    assert rig.engine.loads == [version(2), version(1), version(2)]


@pytest.mark.parametrize("loaded", [True, False])
def test_a_named_version_that_is_gone_is_refused_and_stops_nothing(loaded: bool) -> None:
    rig = Rig(held=3)
    if loaded:
        rig.drain(1)
    rig.weights.remove(version(1))
    rig.replica.accept(assignment(0, under=version(1), lease=4))
    rig.replica.accept(assignment(1))
    refused, done = rig.drain()
    assert refused == AssignmentRejected("p0.0", 4, 0, 7, "weight version 1.1 is gone", retry=True)
    assert isinstance(done, Trajectory)
    assert done.policy_version == version(2)


def test_weights_that_vanish_while_they_are_opened_are_tried_again() -> None:
    rig = Rig(held=1)
    rig.weights.versions = lambda: [version(0), version(1)]  # type: ignore[method-assign]
    rig.replica.announce(version(1))
    rig.drain(1)
    assert (rig.engine.version, rig.replica.state) == (None, "starting")
    rig.publish(1)
    rig.drain(1)
    assert (rig.engine.version, rig.replica.state) == (version(1), "running")


def test_what_no_replica_can_run_is_refused_for_good() -> None:
    rig = Rig(context=8)
    rig.replica.accept(assignment(0, length=8))
    rig.replica.accept(assignment(1))
    refused, done = rig.drain()
    assert isinstance(refused, AssignmentRejected)
    assert (refused.trajectory_id, refused.retry) == ("p0.0", False)
    assert "leaves no room" in refused.reason
    assert done.trajectory_id == "p1.0"


def test_cancel_drops_what_runs_and_what_waits_and_nothing_else() -> None:
    rig = Rig(held=2, steps=3)
    for number, under in ((0, None), (1, None), (2, version(0)), (3, None)):
        rig.replica.accept(assignment(number, under))
    rig.replica.step()
    rig.replica.cancel(dict.fromkeys(["p0.0", "p2.0", "p8.0"], 9))
    assert [done.trajectory_id for done in rig.drain()] == ["p1.0", "p3.0"]
    assert rig.engine.loads == [version(1)]


@pytest.mark.parametrize("running", [True, False])
def test_an_assignment_that_comes_twice_runs_once_under_the_higher_lease(running: bool) -> None:
    rig = Rig(held=1 if running else 0)
    rig.replica.accept(assignment(0, lease=5))
    rig.replica.step()
    rig.replica.accept(assignment(0, lease=8))
    rig.replica.accept(assignment(0, lease=6))
    rig.publish(0)
    (done,) = rig.drain()
    assert isinstance(done, Trajectory)
    assert done.lease == 8


def test_what_fails_says_so() -> None:
    rig = Rig(fails=lambda name: True)
    rig.replica.accept(assignment(0))
    (done,) = rig.drain()
    assert isinstance(done, Trajectory)
    assert (done.finish_reason, done.error, done.version_spans, done.policy_version) == ("failed", "no luck", (), None)
