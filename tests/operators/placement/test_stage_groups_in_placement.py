"""A stage group in placement as a whole: heartbeats in the log, orders in inboxes, and moves of its requests."""

from __future__ import annotations

from typing import Any

import pytest
from placement_harness import Placement, assigned
from test_placement_moves import PERIOD_S, of
from test_stage_group_orders import V1, manifest, ranges

from infra.store.model_parts import model_parts, runs_of
from operators.io.elements import Output
from schemas.records import GroupPlan, RelayArrival, Release, RepackPlan, Reserve, StageGroup, StageStatus
from schemas.topics import INBOX, RELAY, REPLICAS


def stage(placement: Placement, replica: int, **changes: Any) -> None:
    """The heartbeat about the stages of `replica`."""
    fields = {"refusal": "", "version": V1 if changes else None, "group": "", "leads": False, "first": 0, "end": 0}
    status = StageStatus(
        replica=replica,
        incarnation=1,
        host=f"h{replica}",
        store="/s",
        address=f"h{replica}:9",
        **{**fields, "failed": "", "error": "", "lost": (), "sent_at": 0, **changes},
    )
    placement.log.append(REPLICAS, status, f"stage-{replica}")


def arrive(placement: Placement, replica: int, layers: tuple[int, ...], ends: bool = False) -> None:
    parts = model_parts(manifest())
    chunks = set(parts.ends if ends else ()).union(*(parts.layers[layer] for layer in layers))
    arrival = RelayArrival(replica, f"h{replica}", "/s", V1, runs_of(chunks, 64), 1.0, 30.0, 0)
    placement.log.append(REPLICAS, arrival, f"arrival-{replica}")


def joining(restarts: bool = False) -> tuple[Placement, list[Output]]:
    """Replicas 0 and 1 without weights have layers 0-1 and 2-3 of the newest version; returns placement's outputs."""
    placement = Placement(repack_s=PERIOD_S)
    placement.log.append(RELAY, manifest(), str(V1))
    placement.run()
    if restarts:
        placement.restart()
    for replica in (0, 1):
        placement.beat(replica, None)
        stage(placement, replica)
    arrive(placement, 0, (0, 1), ends=True)
    arrive(placement, 1, (2, 3))
    return placement, placement.run()


def led() -> tuple[Placement, str]:
    """As `joining`, once replica 0 leads the group: it has the four trajectories of a prompt."""
    placement, outputs = joining()
    (order,) = of(StageGroup, outputs)
    placement.prompts(0, samples=4)
    placement.beat(0, V1)
    placement.beat(1, None)
    report(placement, order.group)
    assert [replica for _, replica, _ in assigned(placement.run())] == [0] * 4
    return placement, order.group


def report(placement: Placement, group: str) -> None:
    stage(placement, 0, group=group, leads=True, end=2)
    stage(placement, 1, group=group, first=2, end=4)


@pytest.mark.parametrize("restarts", [False, True])
def test_heartbeats_form_a_group_by_an_order_to_its_leader(restarts: bool) -> None:
    placement, outputs = joining(restarts)
    ((order, partition),) = [(each.record, each.partition) for each in outputs if each.topic is INBOX]
    assert (order.version, ranges(order), order.replica, partition) == (V1, [(0, 0, 2), (1, 2, 4)], 0, 0)
    (plan,) = of(GroupPlan, outputs)
    assert (plan.action, plan.seconds_left) == ("formed", 30.0)
    report(placement, order.group)
    assert of(GroupPlan, placement.run(1.0)) == []


def test_whole_member_takes_its_share_of_the_leaders_requests() -> None:
    placement, group = led()

    def beat(reserved: tuple[str, ...] = ()) -> list[Output]:
        placement.beat(0, V1, running=4, kv_used=8)
        placement.beat(1, V1, reserved=reserved)
        report(placement, group)
        return placement.run(PERIOD_S)

    outputs = beat()
    (plan,), (reserve,) = of(RepackPlan, outputs), of(Reserve, outputs)
    assert (plan.reason, [(m.source, m.destination, len(m.trajectory_ids)) for m in plan.moves]) == (
        "balance",
        [(0, 1, 2)],
    )
    assert (reserve.replica, reserve.policy_version) == (1, V1)
    outputs = beat((reserve.plan_id,))
    (order,) = of(Release, outputs)
    assert (order.replica, order.destination, order.trajectory_ids) == (0, 1, plan.moves[0].trajectory_ids)
    assert of(RepackPlan, outputs) + of(RepackPlan, beat((reserve.plan_id,))) == []
