"""When placement plans the moves of replicas that drain."""

from __future__ import annotations

from placement_harness import Placement, newest, with_requests
from test_placement_moves import PERIOD_S, of

from schemas.records import RepackPlan


def test_moves_are_planned_as_soon_as_a_replica_drains() -> None:
    placement = Placement(repack=False)
    placement.prompts(0, samples=2)
    first = placement.publish(0)
    placement.beat(0, first)
    placement.beat(1, first, running=1, capacity=1)
    placement.run()
    placement.beat(1, first, state="draining", running=1, capacity=1)
    placement.run(PERIOD_S)  # the period begins
    placement.beat(0, first, state="draining", running=2, kv_used=6)
    placement.beat(2, first, capacity=4)
    (plan,) = of(RepackPlan, placement.run(0.1))
    assert (plan.reason, [move.source for move in plan.moves]) == ("drain", [0])
    assert of(RepackPlan, placement.run(0.1)) == []


def test_leader_of_a_group_gives_its_work_away_when_it_drains() -> None:
    placement, first = with_requests(2, repack=True), newest()
    placement.shard.fold._stages.leads = lambda replica: replica == 0  # type: ignore
    for state, sources in (("running", []), ("draining", [0])):
        placement.beat(0, first, state=state, running=2, kv_used=6)
        placement.beat(1, first, capacity=4)
        plans = of(RepackPlan, placement.run(PERIOD_S))
        assert [move.source for plan in plans for move in plan.moves] == sources
