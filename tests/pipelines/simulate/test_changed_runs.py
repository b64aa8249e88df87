"""Runs that change: other shards, forgotten offsets, other levels of a curriculum, a batch that cannot be trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from clean_histories import quiet

from infra.kafka.note import Note, place_of
from infra.simulation.cluster import Place
from operators.io.ledger import TrajectoryLedger
from pipelines.simulate.configurations import RELAYS, configuration, resumed_roles, wiring
from pipelines.simulate.faults import Fault
from pipelines.simulate.invariants import Invariants
from pipelines.simulate.simulated_learner import SimulatedLearner
from pipelines.simulate.trained_content import INITIAL, TrainedContent, next_content, row_number
from pipelines.simulate.world import SimulatedHistory, World
from schemas.codec import decode
from schemas.metric_labels import LATER_PARTS
from schemas.records import LevelReply, MicroBatch
from schemas.topics import CURRICULUM, DEAD_LETTERS, EXPERIENCES, METRICS, RELAY, RESTORE, TRAJECTORIES, Topic

__all__ = ["quiet"]


def played(shape: str, *faults: Fault, seed: int = 0) -> World:
    """The end of a history without a failure."""
    history = SimulatedHistory(seed, shape, faults)
    world = World(configuration(shape), wiring(shape), history, record_events=True)
    assert world.run().failure is None
    return world


def written(world: World, topic: Topic) -> list[Any]:
    """The committed records in partition 0 of a topic."""
    log = world.cluster.log(Place(topic.name("simulated"), 0))
    return [each for _, message in log.fetch(0, committed=True) for each in decode(message.value, message.headers)]


@pytest.mark.parametrize(("number", "shards"), [(7, 3), (0, 1)])
def test_resumed_run_has_other_shards_of_score(number: int, shards: int) -> None:
    world = played(
        "score shards", Fault(9.0, "reshard_run", "score", 2.0, number), Fault(20.0, "kill", "score", 1.0, 9)
    )
    assert world.config.score.shards == shards
    assert len([name for name in world.roles if name.startswith("score")]) == shards
    events = [text for _, role, text in world.history.events if role == "score"]
    assert f"has {shards} shards from here on" in events
    experiences = [world.cluster.log(Place(EXPERIENCES.name("simulated"), number)) for number in range(3)]
    assert all(log.end > 10 for log in experiences)


@pytest.mark.parametrize(("number", "shards"), [(7, 3), (0, 1)])
def test_resumed_run_has_other_shards_of_the_buffer(number: int, shards: int) -> None:
    """One of two shards stands still before: the parts of batches that it has not written are written by a new one."""
    pause = Fault(5.0, "pause", "experience-1", 4.5, 5)
    world = played("buffer shards", pause, Fault(9.0, "reshard_run", "experience", 2.0, number))
    assert world.config.experience.shards == shards
    assert len([name for name in world.roles if name.startswith("experience")]) == shards
    metrics = [each for each in written(world, METRICS) if each.name == "experience"]
    assert any(LATER_PARTS in each.values for each in metrics) == (shards == 1)


@pytest.mark.parametrize(("shape", "topic"), [("score shards", TRAJECTORIES), ("buffer shards", EXPERIENCES)])
def test_shards_that_have_ended_hold_no_records_back(shape: str, topic: Topic) -> None:
    """A trim leaves what present readers need; the last shard's group and note keep its last position for ever."""
    world = played(shape, Fault(9.0, "reshard_run", "score", 2.0, 0), Fault(24.0, "trim", "placement", 30.0, 1))
    ended = f"laminar.simulated.{'score' if topic is TRAJECTORIES else 'experience'}.1"
    note = [Note.decode(each.note) for each in written(world, RESTORE) if each.group == ended][-1]
    assert note.sealed
    read = {
        place_of(name): offset
        for name, offset in note.offsets.items()
        if place_of(name).topic.endswith(topic.short_name)
    }
    assert read
    for place, offset in read.items():
        assert world.cluster.log(Place(*place)).begin > offset


@pytest.mark.parametrize("shape", ["score shards", "buffer shards"])
def test_resharding_is_repeated_after_a_kill_at_any_time(shape: str) -> None:
    for number in range(2, 12):
        played(shape, Fault(9.0, "reshard_run", "score", 0.1, number))


def test_experience_that_a_new_shard_scores_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its ledger a shard scores what its predecessor scored after its last note."""
    monkeypatch.setattr("infra.kafka.resharding._lowest", lambda offsets, places: {})
    monkeypatch.setattr(TrajectoryLedger, "add", lambda self, key, size, emission: True)
    history = SimulatedHistory(0, "score shards", (Fault(9.0, "reshard_run", "score", 2.0, 0),))
    failure = World(configuration("score shards"), wiring("score shards"), history).run().failure
    assert "was scored twice" in (failure or "")


def test_run_goes_on_without_the_offsets_of_its_groups() -> None:
    world = played("plain", Fault(8.0, "expire_offsets", "score", 1.0, 0), Fault(8.1, "restart_run", "score", 1.0, 1))
    assert world.cluster.groups()


def test_curriculum_changes_its_level_while_roles_are_killed() -> None:
    names = ("prompts", "experience", "placement", "score")
    world = played("curriculum", *(Fault(6.0 + 2 * n, "kill", name, 1.0, n) for n, name in enumerate(names)))
    assert len({each.level for each in written(world, CURRICULUM) if isinstance(each, LevelReply)}) > 1


def test_admission_goes_on_after_an_untrainable_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one admitted batch nothing is dispatched before a version covers the batch. Its weights do not change."""
    update = SimulatedLearner.update

    def refuse(learner: SimulatedLearner, rows: Sequence[MicroBatch]) -> dict[str, float]:
        if rows[0].batch == 1:
            raise ValueError("a reward is not finite")
        return update(learner, rows)

    def content_after(contents: TrainedContent, count: int) -> str:
        content = INITIAL
        for number in range(count):
            if number != 1:
                content = next_content(content, map(row_number, contents._batches[number]))
        return content

    monkeypatch.setattr(SimulatedLearner, "update", refuse)
    monkeypatch.setattr(TrainedContent, "after", content_after)
    monkeypatch.setattr(Invariants, "_dead_letter", lambda *_: None)  # no other run has one
    shape = "a real trainer"
    config = configuration(shape)
    config = replace(config, placement=replace(config.placement, admitted_batches=1))
    world = World(config, resumed_roles(shape, config), SimulatedHistory(0, shape, ()), relays=RELAYS[shape])
    assert world.run().failure is None
    versions = {batch: each for each in written(world, RELAY) for batch in each.batches}
    assert [batch for batch, each in versions.items() if each.untrained_batches] == [1]
    assert max(versions) > 3
    assert ["a reward is not finite" in each.reason for each in written(world, DEAD_LETTERS)] == [True]
