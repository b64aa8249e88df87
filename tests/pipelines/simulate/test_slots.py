"""A replica with slots generates under newer weights while its older trajectories finish under theirs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest

from infra.simulation.cluster import Place
from pipelines.simulate.configurations import configuration, resumed_roles
from pipelines.simulate.world import SimulatedHistory, World
from schemas.codec import decode
from schemas.records import Trajectory
from schemas.topics import TRAJECTORIES


def trajectories(world: World) -> Iterator[Trajectory]:
    log = world.cluster.log(Place(TRAJECTORIES.name("simulated"), 0))
    for _, message in log.fetch(0, committed=True):
        yield from (row for row in decode(message.value, message.headers) if isinstance(row, Trajectory))


@pytest.mark.parametrize(("refresh", "at_once"), [("slot", True), ("drain", False)])
def test_replica_with_slots_runs_two_versions_at_once(refresh: str, at_once: bool) -> None:
    config = configuration("slots")
    config = replace(config, placement=replace(config.placement, refresh=refresh))
    world = World(config, resumed_roles("slots", config), SimulatedHistory(0, "slots", ()))
    assert world.run().failure is None
    spans = [(each, span.version) for each in trajectories(world) for span in each.version_spans]
    assert len({version for _, version in spans}) > 2
    assert len(spans) == len(list(trajectories(world))), "each is of one version"
    found = any(
        version != other and one.replica == two.replica and one.finished_at > two.first_token_at  # type: ignore[operator]
        for (one, version), (two, other) in combinations(sorted(spans, key=lambda each: each[0].started_at), 2)
    )
    assert found == at_once
