"""Which stage groups placement orders, from heartbeats of relays and replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from infra.store.layout import Layout
from infra.store.model_parts import chunk_orders, model_parts, runs_of
from infra.transport.schedules import k_way
from operators.placement.config import PlacementConfig
from operators.placement.moves import plan_shares
from operators.placement.repack import KVLoad
from operators.placement.replicas import ReplicaTable
from operators.placement.stage_groups import KEPT_VERSIONS, StageGroups
from schemas.records import (
    GroupPlan,
    PolicyVersion,
    RelayArrival,
    RelayStatus,
    ReplicaStatus,
    StageGroup,
    StageStatus,
    TensorSpec,
    WeightVersion,
)

LAYERS = 4
CHUNK = 1024
V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)


def manifest(version: PolicyVersion = V1, names: tuple[str, ...] = ()) -> WeightVersion:
    layers = [f"model.layers.{layer}.{part}.weight" for layer in range(LAYERS) for part in ("mlp", "attn")]
    listed = names or ("lm_head.weight", "model.embed_tokens.weight", *layers, "model.norm.weight")
    specs = tuple(TensorSpec(name, "F32", (4, 512)) for name in listed)
    size = Layout(specs).size
    checks = (0,) * -(-size // CHUNK)
    return WeightVersion(version, None, 1, "f", size, "b", specs, (), (), 0, False, 0, CHUNK, checks)


class Cluster:
    """Replicas, each on its own machine, and placement's records of them; `now` is in seconds."""

    def __init__(self, replicas: int, **config: Any) -> None:
        self.table, self.now = ReplicaTable(), 100.0
        self.groups = StageGroups(PlacementConfig(**config), self.table, 3, lambda: 7)
        self.groups.announce(manifest())
        for replica in range(replicas):
            self.beat(replica)

    def beat(self, replica: int, version: PolicyVersion | None = None, incarnation: int = 1, **stage: Any) -> None:
        state = "starting" if version is None else "running"
        load = (0, 0, 16, 0, 1000, 0, 0.0)
        self.table.record_heartbeat(
            ReplicaStatus(replica, replica, incarnation, state, version, *load, f"h{replica}", 1, 0, "run"), self.now
        )
        fields = {"group": "", "leads": False, "first": 0, "end": 0, "failed": "", "error": "", "lost": ()} | stage
        status = StageStatus(
            replica=replica,
            incarnation=incarnation,
            host=f"h{replica}",
            store="/s",
            address=f"h{replica}:9",
            refusal=fields.pop("refusal", ""),
            version=V1 if fields["group"] else None,
            sent_at=0,
            **fields,
        )
        self.groups.record_stage(status, self.now)

    def arrive(self, replica: int, layers: set[int], ends: bool = False, left: float = 10.0) -> None:
        parts = model_parts(manifest())
        chunks = (set(parts.ends) if ends else set()).union(*(parts.layers[layer] for layer in layers))
        arrival = RelayArrival(replica, f"h{replica}", "/s", V1, runs_of(chunks, 64), 1.0, left, 0)
        self.groups.record_arrival(arrival, self.now)

    def whole(self, replica: int) -> None:
        self.groups.record_relay(RelayStatus(replica, (str(V1),), 1, f"h{replica}", 1, 0, "a:1", "/s"))

    def advance(self) -> tuple[list[StageGroup], list[GroupPlan]]:
        outputs = self.groups.advance(self.now)
        orders = [each for each in outputs if isinstance(each, StageGroup)]
        return orders, [each.record for each in outputs if not isinstance(each, StageGroup)]


def ranges(order: StageGroup) -> list[tuple[int, int, int]]:
    return [(stage.replica, stage.first, stage.end) for stage in order.stages]


def formed() -> Cluster:
    """Replicas 0 and 1 run layers 0-1 and 2-3; replica 2 has layers 1-3 and no group."""
    cluster = Cluster(3)
    cluster.arrive(0, {0, 1}, ends=True)
    cluster.arrive(1, {2, 3})
    ((order,), _) = cluster.advance()
    cluster.arrive(2, {1, 2, 3})
    cluster.beat(0, V1, group=order.group, leads=True, end=2)
    cluster.beat(1, group=order.group, first=2, end=4)
    assert cluster.advance() == ([], [])
    return cluster


def test_group_is_ordered_once_the_parts_cover_the_model() -> None:
    cluster = Cluster(2)
    cluster.arrive(0, {0, 1}, ends=True)
    cluster.arrive(1, {3})
    assert cluster.advance() == ([], [])
    cluster.arrive(1, {2, 3})
    ((order,), (plan,)) = cluster.advance()
    assert (order.group, order.version, ranges(order)) == ("g3-1", V1, [(0, 0, 2), (1, 2, 4)])
    assert (plan.action, plan.stages, plan.seconds_left) == ("formed", order.stages, 10.0)
    assert cluster.advance() == ([], [])


@pytest.mark.parametrize(
    ("config", "left", "stage"),
    [
        pytest.param({"stage_groups": False}, 10.0, {}, id="switched off"),
        pytest.param({"stage_min_s": 4.0}, 3.9, {}, id="soon whole"),
        pytest.param({}, 10.0, {"refusal": "a mixture of experts"}, id="engine cannot"),
        pytest.param({}, 10.0, {"version": PolicyVersion(1, 0)}, id="has weights"),
    ],
)
def test_no_group_is_ordered(config: dict[str, Any], left: float, stage: dict[str, Any]) -> None:
    cluster = Cluster(2, **config)
    cluster.beat(1, **stage)
    cluster.arrive(0, {0, 1}, ends=True, left=left)
    cluster.arrive(1, {2, 3}, left=left)
    assert cluster.advance() == ([], [])


def test_version_that_cannot_be_staged_is_loaded_whole(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    cluster = Cluster(2)
    cluster.groups.announce(manifest(V2, ("transformer.h.0.weight", "transformer.h.1.weight")))
    assert "1.2 cannot run in stages: version 1.2 has layers []" in caplog.text
    cluster.arrive(0, {0, 1}, ends=True)
    cluster.arrive(1, {2, 3})
    assert cluster.advance() == ([], [])


def test_superseded_version_forms_no_new_group() -> None:
    cluster = Cluster(2)
    cluster.groups.announce(manifest(V2))
    cluster.arrive(0, {0, 1}, ends=True)
    cluster.arrive(1, {2, 3})
    assert cluster.advance() == ([], [])


def test_lost_member_is_replaced_under_the_same_leader() -> None:
    cluster = formed()
    cluster.beat(0, V1, group="g3-1", leads=True, end=2, gone=(1,))
    ((order,), (plan,)) = cluster.advance()
    assert ranges(order) == [(0, 0, 2), (2, 2, 4)]
    assert (plan.action, plan.replaces) == ("changed", "g3-1")
    cluster.beat(0, V1, group=order.group, leads=True, end=2)
    assert cluster.advance() == ([], [])
    assert cluster.groups.leads(0)


def test_repair_that_fails_is_tried_with_another_replica() -> None:
    cluster = formed()
    cluster.beat(3)
    cluster.arrive(3, {2, 3})
    lost = {"group": "g3-1", "leads": True, "end": 2, "gone": (1,)}
    cluster.beat(0, V1, **lost)
    ((repair,), _) = cluster.advance()
    assert ranges(repair) == [(0, 0, 2), (2, 2, 4)]
    cluster.beat(0, V1, **lost, failed=repair.group, error="replica 2: no memory", lost=(2,))
    ((again,), plans) = cluster.advance()
    assert [(plan.action, plan.note) for plan in plans] == [("failed", "replica 2: no memory"), ("changed", "")]
    assert ranges(again) == [(0, 0, 2), (3, 2, 4)]


def test_group_of_a_superseded_version_is_repaired() -> None:
    cluster = formed()
    for newer in range(2, 2 + 2 * KEPT_VERSIONS):
        cluster.groups.announce(manifest(PolicyVersion(1, newer)))
    cluster.beat(0, V1, group="g3-1", leads=True, end=2, gone=(1,))
    ((order,), _) = cluster.advance()
    assert (order.version, ranges(order)) == (V1, [(0, 0, 2), (2, 2, 4)])


def test_member_about_to_end_is_replaced_while_it_has_its_kv() -> None:
    cluster = formed()
    cluster.beat(1, group="g3-1", first=2, end=4, refusal="its process is about to end")
    ((order,), (plan,)) = cluster.advance()
    assert (ranges(order), plan.action, plan.replaces) == ([(0, 0, 2), (2, 2, 4)], "changed", "g3-1")
    cluster.beat(0, V1, group=order.group, leads=True, end=2)
    cluster.beat(1, refusal="its process is about to end")
    assert cluster.advance() == ([], [])


def test_leader_about_to_end_gets_a_member_for_a_lost_one() -> None:
    cluster = formed()
    cluster.beat(0, V1, group="g3-1", leads=True, end=2, refusal="its process is about to end", gone=(1,))
    ((order,), _) = cluster.advance()
    assert ranges(order) == [(0, 0, 2), (2, 2, 4)]


def test_group_stays_while_nobody_can_replace_its_member() -> None:
    cluster = formed()
    cluster.beat(2, refusal="its process is about to end")
    cluster.beat(1, group="g3-1", first=2, end=4, refusal="its process is about to end")
    assert cluster.advance() == ([], [])
    assert cluster.groups.leads(0)


def test_failed_group_is_recorded_and_its_replica_avoided() -> None:
    cluster = Cluster(3)
    cluster.arrive(0, {0, 1}, ends=True)
    cluster.arrive(1, {2, 3})
    ((order,), _) = cluster.advance()
    cluster.arrive(2, {2, 3})
    cluster.beat(0, failed=order.group, error="replica 1: chunk 3 has not arrived", lost=(1,))
    ((again,), plans) = cluster.advance()
    assert [(plan.action, plan.note) for plan in plans] == [
        ("failed", "replica 1: chunk 3 has not arrived"),
        ("formed", ""),
    ]
    assert ranges(again) == [(0, 0, 2), (2, 2, 4)]


def test_order_without_a_reply_fails_after_the_timeout() -> None:
    cluster = Cluster(2)
    cluster.arrive(0, {0, 1}, ends=True)
    cluster.arrive(1, {2, 3})
    cluster.advance()
    cluster.now += 11
    for replica in range(2):
        cluster.beat(replica)
    orders, (plan,) = cluster.advance()
    assert (orders, plan.action, plan.note) == ([], "failed", "its leader does not reply")


def test_group_that_is_being_formed_is_not_given_up() -> None:
    cluster = Cluster(2)
    cluster.arrive(0, {0, 1}, ends=True)
    cluster.arrive(1, {2, 3})
    ((order,), _) = cluster.advance()
    for _ in range(6):
        cluster.now += 9
        cluster.beat(0, forming=order.group)
        cluster.beat(1)
        assert cluster.advance() == ([], [])
    cluster.beat(0, V1, group=order.group, leads=True, end=2)
    assert cluster.advance() == ([], [])
    assert cluster.groups.leads(0)


def test_group_ends_when_its_leader_has_left_it() -> None:
    cluster = formed()
    cluster.beat(0, V1)
    _, (plan,) = cluster.advance()
    assert (plan.group, plan.action) == ("g3-1", "ended")
    assert not cluster.groups.leads(0)


def test_members_of_a_dead_leader_form_another_group() -> None:
    cluster = formed()
    cluster.now += 11
    cluster.beat(1)
    cluster.beat(2)
    cluster.arrive(1, {2, 3})
    cluster.arrive(2, {0, 1}, ends=True)
    ((order,), plans) = cluster.advance()
    assert [(plan.action, plan.note) for plan in plans] == [("ended", "its leader is gone"), ("formed", "")]
    assert ranges(order) == [(2, 0, 2), (1, 2, 4)]


def test_restarted_placement_adopts_groups_from_heartbeats() -> None:
    cluster = Cluster(3)
    cluster.beat(0, V1, group="g2-9", leads=True, end=2)
    cluster.beat(1, group="g2-9", first=2, end=4)
    assert cluster.advance() == ([], [])
    assert cluster.groups.leads(0)
    cluster.arrive(0, {0, 1}, ends=True)
    cluster.arrive(2, {2, 3})
    cluster.beat(0, V1, group="g2-9", leads=True, end=2, gone=(1,))
    ((order,), (plan,)) = cluster.advance()
    assert (ranges(order), plan.replaces) == ([(0, 0, 2), (2, 2, 4)], "g2-9")


def test_switch_names_members_with_the_whole_version() -> None:
    cluster = formed()
    assert cluster.groups.switches() == []
    cluster.beat(1, V1, group="g3-1", first=2, end=4)
    cluster.advance()
    assert cluster.groups.switches() == [(0, [1], 1)]


@pytest.mark.parametrize(
    ("whole", "others", "expected"),
    [
        pytest.param([(1, 0)], 3, [(1, 16)], id="one of four"),
        pytest.param([(1, 16), (2, 0)], 2, [(2, 20)], id="the next one"),
        pytest.param([(1, 0), (2, 0)], 1, [(1, 21), (2, 21)], id="two at once"),
        pytest.param([(1, 60)], 1, [], id="has its share"),
    ],
)
def test_whole_members_take_even_shares(
    whole: list[tuple[int, int]], others: int, expected: list[tuple[int, int]]
) -> None:
    leader = KVLoad(0, 640, 10_000, None, 64, 0, 64)
    loads = [KVLoad(replica, 10 * requests, 10_000, None, requests, 0, 64) for replica, requests in whole]
    assert [(move.destination, move.requests) for move in plan_shares(leader, loads, others)] == expected


@pytest.mark.parametrize(("sources", "joiners"), [(1, 1), (2, 2), (3, 4), (4, 2), (4, 4)])
def test_each_layer_is_whole_at_one_joiner_after_its_share(sources: int, joiners: int) -> None:
    """The chunks of layers of 2 MiB + 12 KiB, whose ends are in chunks of two layers."""
    listed = [TensorSpec("model.embed_tokens.weight", "F32", (700, 1024))]
    listed += [TensorSpec(f"model.layers.{layer}.w.weight", "F32", (515, 1024)) for layer in range(13)]
    version, chunk = manifest(names=("model.layers.0.w.weight",)), 1 << 16
    size = Layout(tuple(listed)).size
    version = replace(
        version, tensors=tuple(listed), bytes=size, chunk_bytes=chunk, chunk_checksums=(0,) * -(-size // chunk)
    )
    parts, blocks = model_parts(version), len(version.chunk_checksums)
    groups, has = min(sources, joiners), {sources + joiner: set[int]() for joiner in range(joiners)}
    orders = chunk_orders(parts, blocks, groups)
    share = min(blocks, blocks // groups + max(map(len, parts.layers)))
    for step in k_way("binomial", sources, sources + joiners, blocks, orders):
        for to, block in zip(step.receivers.tolist(), step.blocks.tolist(), strict=True):
            has[to].add(block)
        firsts = [has[sources + group] for group in range(groups)]
        if min(map(len, firsts)) >= share:
            break
    held = [parts.held(chunks) for chunks in firsts]
    assert any(each.ends for each in held)
    assert set().union(*(each.layers for each in held)) == set(range(13))
