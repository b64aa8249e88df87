"""What a run can do with a backup of its log: docs/operations.md, "Backup"."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from clean_histories import quiet

from infra.simulation.cluster import Place
from pipelines.simulate import world as worlds
from pipelines.simulate.configurations import configuration, wiring
from pipelines.simulate.invariants import Invariants
from pipelines.simulate.wiring import wire
from pipelines.simulate.world import SimulatedHistory, World
from schemas.topics import REPLICAS

__all__ = ["quiet"]
SHAPE = "plain"
HEARTBEATS = Place(REPLICAS.name("simulated"), 0)
BACKED_UP_AT_S = 12.0
"""In the middle of the run."""
MARGIN_S = 60.0
"""How long roles that cannot start are tried."""


def new_world() -> World:
    return World(configuration(SHAPE), wiring(SHAPE), SimulatedHistory(0, SHAPE, ()))


@pytest.fixture(scope="module")
def disturbed() -> World:
    """A run that was interrupted."""
    world = new_world()
    world.start_roles()
    world._tick()
    world.scheduler.run(until=BACKED_UP_AT_S)
    world.scheduler.close()
    assert len(world.invariants.batches) > 1
    assert world.invariants.open
    return world


def after_a_restore(world: World, invariants: Invariants) -> World:
    """`world`, whose observer has read the restored log; `invariants` are the facts of that log."""
    unseen: Any = Invariants(world.config)
    unseen._handlers = {}
    world.invariants = unseen
    for place in world.cluster._logs:
        world.cluster.committed(place)
    world.invariants = invariants
    return world


def test_run_continues_from_a_snapshot_of_all_disks(disturbed: World) -> None:
    kept: dict[int, Any] = {id(disturbed.config): disturbed.config}
    restored = new_world()
    for name in ("_logs", "_transactions", "_offsets", "_pending", "_next_producer_id"):
        setattr(restored.cluster, name, copy.deepcopy(getattr(disturbed.cluster, name), kept))
    invariants = copy.deepcopy(disturbed.invariants, {id(disturbed.config): disturbed.config})
    history = after_a_restore(restored, invariants).run()
    assert history.failure is None
    assert restored.invariants.batches.keys() > disturbed.invariants.batches.keys()


def mirror_of(world: World) -> World:
    """A mirror has the committed records alone: without markers, at other offsets, so it has no note."""
    mirror = new_world()
    for place, log in world.cluster._logs.items():
        for _, message in log.fetch(log.begin, committed=True):
            mirror.cluster.log(place).append([message])
    return mirror


def committed_in(world: World) -> dict[Place, list[tuple[int, Any]]]:
    """The committed records of each partition."""
    return {place: log.fetch(log.begin, committed=True) for place, log in world.cluster._logs.items()}


@pytest.mark.parametrize("name", [each.role.name for each in wiring(SHAPE)])
def test_role_refuses_its_own_output_without_a_note(disturbed: World, name: str) -> None:
    """Kafka has deleted its group's offsets. Only rollouts' heartbeats show that they have started before."""
    mirror = after_a_restore(mirror_of(disturbed), Invariants(disturbed.config))
    mirror.roles[name].start()
    mirror.scheduler.run(until=5.0)
    assert f"{name} ended with NoteMissing" in (mirror.history.failure or "")
    trace = "replicas:0 holds a heartbeat of its start 1" if name.startswith("rollout") else "holds its output"
    assert f"{trace}: a start without it would assign all numbers again" in (mirror.history.failure or "")


@pytest.mark.parametrize(("before", "after", "joining"), [((2, 1), (3, 1), "rollout-2"), ((1, 2), (2, 1), "rollout-1")])
def test_rollout_joins_a_run_that_has_heartbeats(before: tuple[int, int], after: tuple[int, int], joining: str) -> None:
    """A resumed run has more processes, of `before` and `after` with as many replicas each: a replica of the one that
    joins was another's."""
    worlds_of_sizes = []
    for processes, replicas in (before, after):
        config = configuration(SHAPE)
        config = replace(config, rollout=replace(config.rollout, processes=processes, replicas=replicas))
        worlds_of_sizes.append(World(config, wire(config), SimulatedHistory(0, SHAPE, ())))
    earlier, resumed = worlds_of_sizes
    for name in (name for name in earlier.roles if name.startswith("rollout")):
        earlier.roles[name].start()
    earlier.scheduler.run(until=5.0)
    earlier.scheduler.close()
    assert earlier.cluster.log(HEARTBEATS).end > 1
    kept: dict[int, Any] = {id(earlier.config): earlier.config}
    resumed.cluster._logs = copy.deepcopy(earlier.cluster._logs, kept)
    resumed.roles[joining].start()
    resumed.scheduler.run(until=5.0)
    resumed.scheduler.close()
    assert (resumed.history.failure, resumed.roles[joining].start_number) == (None, 1)


def test_no_role_starts_on_a_mirror(disturbed: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "CALM_S", MARGIN_S)
    mirror = mirror_of(disturbed)
    before = committed_in(mirror)
    assert sum(map(len, before.values())) > 50
    history = after_a_restore(mirror, copy.deepcopy(disturbed.invariants)).run()
    assert "ended with NoteMissing" in (history.failure or "")
    assert {role.start_number for role in mirror.roles.values()} == {0}
    assert committed_in(mirror) == before
