"""A replica: weight versions, assignments, cancellations and rejections."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from record_factories import prompt, version
from scripted_engine import ScriptedEngine, ScriptedWeights

from operators.rollout.config import RolloutConfig
from operators.rollout.engine import CannotGenerate
from operators.rollout.replica import Replica
from schemas.columns import token_ids
from schemas.records import Assignment, AssignmentRejected, PolicyVersion, Trajectory, VersionSpan


def assignment(
    number: int,
    under: PolicyVersion | None = None,
    lease: int = 1,
    length: int = 3,
    at_least: PolicyVersion | None = None,
) -> Assignment:
    asked = prompt(number, 1, token_ids=token_ids([1] * length))
    return Assignment(asked, 0, lease, lease, 0, 7, under, None, 0, at_least=at_least)


def question(number: int, under: PolicyVersion) -> Assignment:
    """Of an evaluation, which names its version."""
    return replace(assignment(number, under), prompt=prompt(number, 1, purpose="evaluation", policy_version=under))


class Rig:
    """A replica over an engine that takes `steps` steps per request, with the weight versions 0 to `held` - 1."""

    def __init__(self, held: int = 1, steps: int = 2, config: RolloutConfig | None = None, **engine: Any) -> None:
        self.engine = ScriptedEngine(steps=lambda name: steps, **engine)
        self.weights = ScriptedWeights()
        self.replica = Replica(0, 7, self.engine, self.weights, lambda tokens: f"{tokens}", lambda: 42, config)
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


def test_finished_trajectory_records_its_origin() -> None:
    rig = Rig()
    rig.replica.accept(assignment(3, lease=9))
    (done,) = rig.drain()
    assert isinstance(done, Trajectory)
    assert (done.trajectory_id, done.lease, done.attempt, done.replica, done.incarnation) == ("p3.0", 9, 9, 0, 7)
    assert done.version_spans == (VersionSpan(version(0), 2),)
    assert done.response.token_ids.to_pylist() == [0, 0]
    assert done.response.loss_mask.to_pylist() == [True, True]
    assert (done.text, done.finish_reason, done.newest_version, done.started_at) == ("[0, 0]", "stop", version(0), 42)
    assert done.token_sampler == "laminar"
    assert not rig.replica.busy()


@pytest.mark.parametrize(
    ("engine", "token_sampler", "recorded"), [("vllm", "vllm", "vllm"), ("emulated", "laminar", None)]
)
def test_finished_trajectory_records_its_sampler(engine: Any, token_sampler: Any, recorded: str | None) -> None:
    rig = Rig(config=RolloutConfig(engine=engine, token_sampler=token_sampler))
    rig.replica.accept(assignment(3))
    (done,) = rig.drain()
    assert isinstance(done, Trajectory)
    assert done.token_sampler == recorded


def test_replica_waits_for_its_first_weights() -> None:
    rig = Rig(held=0)
    rig.replica.accept(assignment(0))
    assert (rig.drain(), rig.replica.state, rig.replica.busy()) == ([], "starting", False)
    rig.publish(0, arrived=False)
    assert rig.drain() == []
    rig.publish(0)
    assert [done.policy_version for done in rig.drain()] == [version(0)]  # type: ignore[union-attr]
    assert rig.replica.state == "running"


def test_replica_is_not_busy_while_its_work_waits_for_weights() -> None:
    rig = Rig()
    rig.drain(1)
    rig.publish(1, arrived=False)
    rig.replica.accept(assignment(0, at_least=version(1)))
    assert (rig.drain(), rig.replica.busy(), rig.replica.idle) == ([], False, False)
    rig.publish(1)
    assert rig.replica.busy()
    assert [done.policy_version for done in rig.drain()] == [version(1)]  # type: ignore[union-attr]


def test_replica_loads_only_announced_versions() -> None:
    rig = Rig()
    rig.weights.add(version(5))
    rig.drain(1)
    assert rig.engine.loads == [version(0)]


def test_weights_change_only_between_batches() -> None:
    rig = Rig(steps=3)
    rig.replica.accept(assignment(0))
    rig.replica.step()
    rig.publish(1)
    rig.replica.accept(assignment(1))
    done = rig.drain()
    assert [(d.trajectory_id, d.policy_version) for d in done] == [("p0.0", version(0)), ("p1.0", version(0))]  # type: ignore[union-attr]
    assert done[0].newest_version == version(1)  # type: ignore[union-attr]
    assert rig.engine.loads == [version(0), version(1)]


def test_named_version_is_loaded_when_the_engine_is_empty() -> None:
    rig = Rig(held=3)
    rig.replica.accept(assignment(0))
    rig.replica.step()
    rig.replica.accept(assignment(1, under=version(1)))
    rig.replica.accept(assignment(2))
    done = {d.trajectory_id: d.policy_version for d in rig.drain()}  # type: ignore[union-attr]
    assert done == {"p0.0": version(2), "p1.0": version(1), "p2.0": version(2)}
    assert rig.engine.loads == [version(2), version(1), version(2)]


@pytest.mark.parametrize("held", [2, 1])
def test_assignment_waits_for_the_version_that_it_needs(held: int) -> None:
    """An evaluation has loaded older weights than those which placement knew of; newer ones may not be here yet."""
    rig = Rig(held=held)
    rig.replica.accept(assignment(0, under=version(0)))
    rig.replica.step()
    rig.replica.accept(assignment(1, at_least=version(1)))
    done = rig.drain()
    rig.publish(1)
    done += rig.drain()
    assert {d.trajectory_id: d.policy_version for d in done} == {"p0.0": version(0), "p1.0": version(1)}  # type: ignore[union-attr]


@pytest.mark.parametrize("loaded", [True, False])
def test_assignment_of_a_missing_version_is_rejected(loaded: bool) -> None:
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


def test_question_waits_until_its_version_arrives() -> None:
    """The manifest and the question may be here before the bytes."""
    rig = Rig(held=1)
    rig.drain(1)
    rig.publish(1, arrived=False)
    rig.replica.accept(question(0, version(1)))
    assert rig.drain(3) == []
    rig.weights.add(version(1))
    (done,) = rig.drain()
    assert isinstance(done, Trajectory)
    assert done.policy_version == version(1)


def test_question_of_a_version_that_never_arrived_is_rejected() -> None:
    rig = Rig(held=1)
    rig.drain(1)
    rig.publish(1, arrived=False)
    rig.replica.accept(question(0, version(1)))
    assert rig.drain(3) == []
    rig.publish(2)
    assert rig.drain(2) == [AssignmentRejected("e0.0", 1, 0, 7, "weight version 1.1 is gone", retry=False)]


def test_assignment_is_rejected_once_its_version_is_gone() -> None:
    rig = Rig(held=2, steps=20)
    rig.replica.accept(assignment(0))
    rig.replica.accept(assignment(1, under=version(0)))
    assert rig.drain(5) == []
    rig.weights.remove(version(0))
    assert rig.drain(1) == [AssignmentRejected("p1.0", 1, 0, 7, "weight version 1.0 is gone", retry=True)]


def test_weight_load_is_retried_after_an_eviction() -> None:
    rig = Rig(held=1)
    rig.weights.versions = lambda: [version(0), version(1)]  # type: ignore[method-assign]
    rig.replica.announce(version(1))
    rig.drain(1)
    assert (rig.engine.version, rig.replica.state) == (None, "starting")
    rig.publish(1)
    rig.drain(1)
    assert (rig.engine.version, rig.replica.state) == (version(1), "running")


def test_weights_of_another_model_are_a_permanent_error(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()

    def load(weights: Path, version: PolicyVersion) -> None:
        raise ValueError("the weights do not fit")

    monkeypatch.setattr(rig.engine, "load", load)
    with pytest.raises(
        CannotGenerate, match=r"replica 0 cannot load weight version 1\.0: .* do not fit\. Set model\.path"
    ):
        rig.drain(1)
    assert rig.replica.state == "starting"


def test_invalid_assignment_is_rejected_without_retry() -> None:
    rig = Rig(context=8)
    rig.replica.accept(assignment(0, length=8))
    rig.replica.accept(assignment(1))
    refused, done = rig.drain()
    assert isinstance(refused, AssignmentRejected)
    assert (refused.trajectory_id, refused.retry) == ("p0.0", False)
    assert "leaves no room" in refused.reason
    assert done.trajectory_id == "p1.0"


def test_cancel_drops_running_and_waiting_trajectories() -> None:
    rig = Rig(held=2, steps=3)
    for number, under in ((0, None), (1, None), (2, version(0)), (3, None)):
        rig.replica.accept(assignment(number, under))
    rig.replica.step()
    rig.replica.cancel(dict.fromkeys(["p0.0", "p2.0", "p8.0"], 9))
    assert [done.trajectory_id for done in rig.drain()] == ["p1.0", "p3.0"]
    assert rig.engine.loads == [version(1)]


@pytest.mark.parametrize("running", [True, False])
def test_repeated_assignment_runs_once_under_the_latest_lease(running: bool) -> None:
    rig = Rig(held=1 if running else 0)
    rig.replica.accept(assignment(0, lease=5))
    rig.replica.step()
    rig.replica.accept(assignment(0, lease=8))
    rig.replica.accept(assignment(0, lease=6))
    rig.publish(0)
    (done,) = rig.drain()
    assert isinstance(done, Trajectory)
    assert done.lease == 8


def test_failed_trajectory_records_its_error() -> None:
    rig = Rig(fails=lambda name: True)
    rig.replica.accept(assignment(0))
    (done,) = rig.drain()
    assert isinstance(done, Trajectory)
    assert (done.finish_reason, done.error, done.version_spans, done.policy_version) == ("failed", "no luck", (), None)


def test_early_assignments_are_compared_once_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before each of the hundreds of engine steps of the batch before them."""
    compared: list[PolicyVersion] = []

    def is_newer(of: Assignment, loaded: PolicyVersion) -> bool:
        compared.append(loaded)
        return of.at_least is not None and loaded < of.at_least

    monkeypatch.setattr("operators.rollout.waiting_assignments._is_newer", is_newer)
    rig = Rig(steps=40)
    rig.replica.accept(assignment(0))
    for number in range(1, 5):
        rig.replica.accept(assignment(number, at_least=version(1)))
    rig.drain(30)
    assert len(compared) == 5
    rig.replica.accept(assignment(4, lease=2))  # its new owner's lease lets it start at once
    rig.drain(2)
    rig.replica.accept(assignment(5))
    rig.replica.cancel({"p1.0": 1})
    rig.publish(1)
    assert [done.trajectory_id for done in rig.drain(200)] == ["p0.0", "p4.0", "p5.0", "p2.0", "p3.0"]  # type: ignore[union-attr]
