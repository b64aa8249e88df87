"""An engine of two weight versions, and a replica over it: each trajectory begins and ends under one of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from emulated_engines import emulated
from record_factories import prompt, version
from scripted_engine import ScriptedEngine, ScriptedWeights
from test_replica import assignment, question
from tiny_engines import request

from operators.rollout.emulated_engine import share_device
from operators.rollout.replica import Replica
from operators.rollout.two_versions import TwoVersionEngine
from schemas.records import Trajectory, VersionSpan

WEIGHTS = Path("unread")


def scripted(steps: dict[str, int]) -> TwoVersionEngine:
    """Requests take as many steps as `steps` says."""
    return TwoVersionEngine(*(ScriptedEngine(steps=lambda name: steps[name]) for _ in range(2)))


def test_newer_weights_are_loaded_beside_running_requests() -> None:
    it = scripted({"p0.0": 3, "p0.1": 2, "p0.2": 1})
    it.load(WEIGHTS, version(0))
    it.submit(request(0))
    it.step()
    it.load(WEIGHTS, version(1))
    assert (it.version, it.status().running, it.may_load()) == (version(1), 1, True)  # none began under 1.1
    it.submit(request(1))
    assert not it.may_load()
    with pytest.raises(RuntimeError, match=r"requests of two versions run; 1\.2 cannot be loaded"):
        it.load(WEIGHTS, version(2))
    with pytest.raises(ValueError, match="already in the engine"):
        it.submit(request(0))
    generated = it.generated({"p0.0": 0, "p0.1": 0})
    assert {name: each.token_ids.tolist() for name, each in generated.items()} == {"p0.0": [0], "p0.1": []}
    assert it.step() == []
    done = {each.trajectory_id: each.generated.token_ids.tolist() for each in it.step()}
    assert done == {"p0.0": [0, 0, 0], "p0.1": [1, 1]}
    assert it.status().tokens_generated == 5
    it.load(WEIGHTS, version(2))
    it.submit(request(2))
    assert [each.generated.token_ids.tolist() for each in it.step()] == [[2]]


def test_released_requests_leave_room_for_other_weights() -> None:
    it = scripted({"p0.0": 9, "p0.1": 9})
    it.load(WEIGHTS, version(0))
    it.submit(request(0))
    it.step()
    it.load(WEIGHTS, version(1))
    it.submit(request(1))
    it.step()
    released = it.release(["p0.1", "p0.0", "unknown"])
    assert {name: each.token_ids.tolist() for name, each in released.items()} == {"p0.0": [0, 0], "p0.1": [1]}
    assert it.may_load()
    assert it.status().running == 0


class Rig:
    """A replica of two versions whose trajectories take `steps` steps each."""

    def __init__(self, steps: int) -> None:
        self.engine = TwoVersionEngine(*(ScriptedEngine(steps=lambda name: steps) for _ in range(2)))
        self.weights = ScriptedWeights()
        self.replica = Replica(0, 7, self.engine, self.weights, str, lambda: 42, may_load=self.engine.may_load)

    def publish(self, number: int) -> None:
        self.weights.add(version(number))
        self.replica.announce(version(number))

    def step(self) -> list[Trajectory]:
        return [each for each in self.replica.step() if isinstance(each, Trajectory)]


def test_replica_begins_under_newer_weights_while_others_finish() -> None:
    rig = Rig(steps=3)
    rig.publish(0)
    rig.replica.accept(assignment(0))
    assert rig.step() == []
    rig.publish(1)
    rig.replica.accept(assignment(1, at_least=version(1)))
    assert rig.step() == []
    rig.publish(2)  # both places are taken
    rig.replica.accept(assignment(2))
    done = {each.trajectory_id: each.version_spans for _ in range(8) for each in rig.step()}
    assert done == {
        "p0.0": (VersionSpan(version(0), 3),),
        "p1.0": (VersionSpan(version(1), 3),),
        "p2.0": (VersionSpan(version(1), 3),),
    }
    rig.replica.accept(assignment(3))
    done = {each.trajectory_id: each.version_spans for _ in range(4) for each in rig.step()}
    assert done == {"p3.0": (VersionSpan(version(2), 3),)}
    assert rig.replica.idle


def test_replica_answers_questions_under_their_version() -> None:
    rig = Rig(steps=2)
    rig.publish(0)
    rig.publish(1)
    rig.replica.accept(assignment(0))
    rig.step()
    rig.replica.accept(question(5, version(0)))
    done = {each.trajectory_id: each.version_spans for _ in range(8) for each in rig.step()}
    assert done == {
        "p0.0": (VersionSpan(version(1), 2),),
        prompt(5, 1, purpose="evaluation").prompt_id + ".0": (VersionSpan(version(0), 2),),
    }


def test_emulated_engines_of_one_device_take_turns() -> None:
    clock = [0.0]

    def finished_at(beside: bool) -> float:
        clock[0] = 0.0
        one, other = (emulated(clock=lambda: clock[0]) for _ in range(2))
        if beside:
            share_device(one, other)
        for each, number in ((one, 0), (other, 1)):
            each.load(WEIGHTS, version(0))
            each.submit(request(number))
        while not (done := [*one.step(), *other.step()]):
            clock[0] += max(one.due(), 1e-4)
        assert len(done) <= 2
        return clock[0]

    assert finished_at(beside=True) == pytest.approx(2 * finished_at(beside=False), rel=0.3)
