"""Groups of replicas that run a version in stages give the tokens of a whole engine, whatever happens to the group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from staged_replicas import (
    LAYERS,
    Network,
    Replica,
    Replicas,
    Version,
    assert_all_same,
    finish,
    group,
    lead,
    submit,
    three_stages,
    wait,
)
from tiny_engines import mixed

from infra import machine
from infra.certificates import write_relay_files
from infra.store.weight_store import WeightStore
from infra.transport.endpoint import Endpoint
from infra.transport.relay_node import RelayNode
from infra.transport.tls import Tls
from operators.relay.relay import StatusMaker
from operators.rollout.engine import KV, Completion
from operators.rollout.kv_slots import KVSlots
from operators.rollout.staged import pipeline, service, stage
from operators.rollout.staged.staged_runner import StagedRunner
from schemas.records import PolicyVersion


def test_group_generates_the_tokens_of_a_whole_engine(
    replicas: Replicas, version: Version, expected: dict[str, Completion]
) -> None:
    made = three_stages(replicas, version)
    assert [(each.staging.status(0).leads, each.staging.status(0).group) for each in made] == [
        (True, "g-1"),
        (False, "g-1"),
        (False, "g-1"),
        (False, ""),
    ]
    submit(made[0], mixed(18))
    assert_all_same(finish(made[0]), expected)


def test_stages_over_tls_give_the_tokens_of_a_whole_engine(
    replicas: Replicas, version: Version, expected: dict[str, Completion], tmp_path: Path
) -> None:
    """Also when another member takes the KV of a stage over."""
    write_relay_files(tmp_path)
    tls = Tls(str(tmp_path / "relay.pem"), str(tmp_path / "ca.pem"))
    made = three_stages(partial(replicas, tls=tls), version)
    submit(made[0], mixed(18))
    done = finish(made[0], 4)
    replace_first_member(made, version)
    made[1].die()
    assert_all_same(done | finish(made[0]), expected)


def halfway(replicas: Replicas, version: Version) -> tuple[list[Replica], Replica, dict[str, Completion]]:
    """Three stages with requests of which some have finished: the replicas, the leader, and these."""
    made = three_stages(replicas, version)
    submit(made[0], mixed(18))
    return made, made[0], finish(made[0], 4)


def test_leader_takes_the_kv_over_when_it_is_whole(
    replicas: Replicas, version: Version, expected: dict[str, Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, leader, done = halfway(replicas, version)
    runner = leader.engine._own_runner
    monkeypatch.setattr(runner, "prefill", lambda *args: pytest.fail("KV was computed again"))
    leader.whole(version)
    assert leader.staging.advance()
    assert not leader.staging.status(0).leads
    assert not leader.engine.staged
    assert leader.engine.status().running
    assert_all_same(done | finish(leader), expected)


def replace_first_member(made: list[Replica], version: Version) -> None:
    """Have the leader form group g-2, with replica 3 in the place of replica 1."""
    stages = [made[0].stage(0, 2), made[3].stage(2, 4), made[2].stage(4, 5)]
    lead(made[0], group(version, stages, "g-2"))
    assert made[0].staging.status(0).group == "g-2"


def test_lost_member_costs_only_the_kv_of_its_stage(
    replicas: Replicas, version: Version, expected: dict[str, Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = three_stages(replicas, version)
    leader = made[0]
    submit(leader, mixed(18))
    done = finish(leader, 4, lambda step: made[1].die() if step == 3 else None)
    status = leader.staging.status(0)
    assert (leader.engine.due() > 0, status.group, status.gone) == (True, "g-1", (1,))
    computed: list[set[int]] = []
    original = StagedRunner.prefill

    def record(self: StagedRunner, blocks: object, layers: object = None) -> None:
        computed.append(set(layers or ()))  # type: ignore[arg-type]
        original(self, blocks, layers)  # type: ignore[arg-type]

    monkeypatch.setattr(StagedRunner, "prefill", record)
    replace_first_member(made, version)
    rebuilt = {frozenset(layers) for layers in computed}
    assert rebuilt
    assert rebuilt <= {frozenset({2, 3}), frozenset(range(LAYERS))}  # all layers: rows just admitted
    assert frozenset({2, 3}) in rebuilt
    assert_all_same(done | finish(leader), expected)


def test_member_that_is_replaced_hands_its_kv_over(
    replicas: Replicas, version: Version, expected: dict[str, Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, leader, done = halfway(replicas, version)
    with monkeypatch.context() as patched:
        patched.setattr(StagedRunner, "prefill", lambda *args: pytest.fail("KV was computed again"))
        replace_first_member(made, version)
    made[1].die()
    assert_all_same(done | finish(leader), expected)


def partition_in_step_3(leader: Replica, network: Network) -> Callable[[int], None]:
    """What `finish` calls in each step: in step 3 the first member of `leader`, behind `network`, hangs."""

    def hang(step: int) -> None:
        if step == 3:
            leader.staging._led[1].members[0].watch.settimeout(0.05)  # type: ignore[index]
            network.partitioned.set()

    return hang


def test_member_that_hangs_is_lost(
    replicas: Replicas, version: Version, expected: dict[str, Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "HEARTBEAT_S", 0.05)
    leader, member, other = replicas(3)
    leader.arrive(version, (0, 1), ends=True)
    for each in (member, other):
        each.arrive(version, (2, 3, 4))
    with closing(Network(member.transfers.address)) as network:
        place = replace(member.stage(2, 5), address=network.address)
        lead(leader, group(version, [leader.stage(0, 2), place]))
        assert leader.staging.status(0).leads, leader.staging.status(0).error
        submit(leader, mixed(18))
        done = finish(leader, 4, partition_in_step_3(leader, network))
        status = leader.staging.status(0)
        assert (leader.engine.due() > 0, status.group, status.gone) == (True, "g-1", (1,))
    lead(leader, group(version, [leader.stage(0, 2), other.stage(2, 5)], "g-2"))
    assert_all_same(done | finish(leader), expected)


def test_member_that_waits_for_a_hung_one_keeps_its_kv(
    replicas: Replicas, version: Version, expected: dict[str, Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "HEARTBEAT_S", 0.05)
    made = replicas(4)
    for each, layers in zip(made, [(0, 1), (2, 3), (4,), (2, 3)], strict=True):
        each.arrive(version, layers, ends=each is made[0])
    leader, waiting = made[0], made[2]
    with closing(Network(made[1].transfers.address)) as network:
        place = replace(made[1].stage(2, 4), address=network.address)
        lead(leader, group(version, [leader.stage(0, 2), place, waiting.stage(4, 5)]))
        assert leader.staging.status(0).leads, leader.staging.status(0).error
        submit(leader, mixed(18))
        done = finish(leader, 4, partition_in_step_3(leader, network))
        assert (leader.engine.due() > 0, leader.staging.status(0).gone) == (True, (1,))
        lead(leader, group(version, [leader.stage(0, 2), made[3].stage(2, 4), waiting.stage(4, 5)], "g-2"))
        assert leader.staging.status(0).group == "g-2", leader.staging.status(0).error
        assert_all_same(done | finish(leader), expected)


@pytest.mark.parametrize("in_a_pass", [False, True])
def test_member_drops_its_stage_when_its_leader_hangs(
    replicas: Replicas, version: Version, monkeypatch: pytest.MonkeyPatch, in_a_pass: bool
) -> None:
    leader, member = replicas(2)
    leader.arrive(version, (0, 1), ends=True)
    member.arrive(version, (2, 3, 4))
    monkeypatch.setattr(pipeline, "HEARTBEAT_S", 0.05)
    lead(leader, group(version, [leader.stage(0, 2), member.stage(2, 5)]))
    newer = PolicyVersion(1, 2)
    assert leader.staging.status(0).leads, leader.staging.status(0).error
    assert member.staging.status(0).group == "g-1"
    assert not member.staging.may_load(newer)
    hangs, goes_on = threading.Event(), threading.Event()
    original = pipeline.send_message

    def hang(connection: Any, link: Any, kind: str, *args: Any, **body: Any) -> None:
        if kind == "hidden":  # the member has the plan of the step, and waits for these
            hangs.set()
            goes_on.wait(60)
        original(connection, link, kind, *args, **body)

    step = threading.Thread(target=leader.engine.step, daemon=True)
    if in_a_pass:
        monkeypatch.setattr(pipeline, "send_message", hang)
        submit(leader, mixed(1))
        step.start()
        assert hangs.wait(30)
    applied, receive = threading.Event(), service.receive

    def note_timeout(connection: Any) -> Any:
        if connection.gettimeout() == 0.5:
            applied.set()
        return receive(connection)

    monkeypatch.setattr(service, "receive", note_timeout)
    monkeypatch.setattr(service, "HEARTBEAT_TIMEOUT_S", 0.5)
    assert applied.wait(30)  # the member applies it at the next heartbeat
    monkeypatch.setattr(pipeline, "HEARTBEAT_S", 1000.0)
    wait(lambda: member.staging.status(0).group == "" and member.staging.may_load(newer))
    goes_on.set()
    wait(lambda: not step.is_alive())


def test_members_vanish_one_after_another_until_leader_is_whole(
    replicas: Replicas, version: Version, expected: dict[str, Completion]
) -> None:
    made = three_stages(replicas, version)
    leader, third, spare = made[0], made[2], made[3]
    submit(leader, mixed(18))
    done = finish(leader, 3)
    assert leader.staging.status(0).gone is None
    made[1].die()
    done |= finish(leader)
    refused = replace(spare.stage(2, 4), incarnation=9)
    lead(leader, group(version, [leader.stage(0, 2), refused, third.stage(4, 5)], "g-2"))
    status = leader.staging.status(0)
    assert (status.group, status.gone, status.failed, status.lost) == ("g-1", (1,), "g-2", (3,))
    assert "replica 3 is incarnation 1, not 9" in status.error
    lead(leader, group(version, [leader.stage(0, 2), spare.stage(2, 4), third.stage(4, 5)], "g-3"))
    status = leader.staging.status(0)
    assert (status.group, status.gone) == ("g-3", None)
    done |= finish(leader, 2)
    spare.die()
    third.die()
    done |= finish(leader)
    assert leader.staging.status(0).gone == (3, 2)
    leader.whole(version)
    leader.staging.advance()
    assert leader.staging.status(0).gone is None
    assert_all_same(done | finish(leader), expected)


def test_group_is_refused_if_a_chunk_has_not_arrived(replicas: Replicas, version: Version) -> None:
    leader, member = replicas(2)
    leader.arrive(version, (0, 1), ends=True)
    member.arrive(version, (2, 3))
    lead(leader, group(version, [leader.stage(0, 2), member.stage(2, 5)]))
    status = leader.staging.status(0)
    assert (leader.staging.status(0).leads, status.failed, status.lost) == (False, "g-1", (1,))
    assert "replica 1: chunk" in status.error
    assert "has not arrived" in status.error
    assert member.staging.may_load(version.version)


def no_memory(**shape: Any) -> KVSlots:
    raise torch.OutOfMemoryError("tried to allocate 9 GiB")


def test_stages_without_memory_use_that_of_their_engines(
    replicas: Replicas, version: Version, expected: dict[str, Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "KVSlots", no_memory)
    made = three_stages(replicas, version)
    leader, member, third, spare = made
    submit(leader, mixed(18))
    done = finish(leader, 3)
    assert not member.staging.may_load(version.version)  # the memory of its engine is in use
    with member.staging.member.claims.changing(version.version) as free:
        assert not free
    member.die()
    done |= finish(leader)
    third.arrive(version, (3, 4))
    lead(leader, group(version, [leader.stage(0, 2), spare.stage(2, 3), third.stage(3, 5)], "g-2"))
    assert leader.staging.status(0).group == "g-2", leader.staging.status(0).error
    done |= finish(leader, 2)
    monkeypatch.setattr(leader.engine._own_runner, "prefill", lambda *args: pytest.fail("KV was computed again"))
    leader.whole(version)
    assert leader.staging.advance()
    monkeypatch.undo()
    wait(lambda: third.staging.may_load(version.version))
    assert_all_same(done | finish(leader), expected)


def test_stage_without_memory_of_a_whole_engine_is_refused(
    replicas: Replicas, version: Version, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, member = replicas(2)
    leader.arrive(version, (0, 1), ends=True)
    member.whole(version)
    member.engine.load(member.store.path(version.version), version.version)
    monkeypatch.setattr(stage, "KVSlots", no_memory)
    lead(leader, group(version, [leader.stage(0, 2), member.stage(2, 5)]))
    status = leader.staging.status(0)
    assert (leader.staging.status(0).leads, status.failed, status.lost) == (False, "g-1", (1,))
    assert "replica 1: no memory for the KV of 3 layers, 16 rows" in status.error
    newer = Version(tmp_path, number=2, seed=9).version
    wait(lambda: leader.staging.may_load(newer) and member.staging.may_load(newer))


def test_stages_and_relays_name_the_same_machine(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    """Placement pairs a replica with the relay that fills its store. A container has a host name of its own."""
    monkeypatch.setenv(machine.VARIABLE, "node-1")
    (replica,) = replicas(1)
    folder = replica.staging.member.store
    endpoint = Endpoint(token="a-token-of-the-tests")
    with WeightStore(folder, 4) as store, closing(RelayNode(store, "run", 0, endpoint)) as node:
        relay = StatusMaker(node, str(folder), 0.0, machine.machine_name()).make((), 0, 1.0, 0)
    status = replica.staging.status(0)
    assert (status.host, status.store) == (relay.host, relay.store) == ("node-1", relay.store)


def test_stage_keeps_its_version_until_the_group_ends(replicas: Replicas, version: Version, tmp_path: Path) -> None:
    made = three_stages(replicas, version)
    newer = Version(tmp_path, number=2, seed=9)
    leader, member = made[0], made[1]
    assert not member.staging.may_load(newer.version)
    assert member.staging.may_load(version.version)
    member.arrive(newer, range(LAYERS), ends=True)
    made[3].arrive(newer, range(LAYERS), ends=True)
    lead(made[3], group(newer, [made[3].stage(0, 2), member.stage(2, 5)], "g-2"))
    assert f"uses weight version {version.version}" in made[3].staging.status(0).error
    assert leader.staging.may_load(newer.version)
    assert not leader.staging.may_load(version.version)
    leader.staging.leave()
    assert leader.engine.version is None


def test_hand_over_from_a_group_takes_the_kv_along(
    replicas: Replicas, version: Version, expected: dict[str, Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = three_stages(replicas, version)
    leader, other = made[0], made[3]
    other.whole(version)
    other.engine.load(other.store.path(version.version), version.version)
    requests = {request.trajectory_id: request for request in mixed(18)}
    submit(leader, list(requests.values()))
    done = finish(leader, 4)
    running = [name for name in requests if leader.engine.generated({name: 0}).get(name) and name not in done][:5]
    monkeypatch.setattr(other.engine._own_runner, "prefill", lambda *args: pytest.fail("KV was computed again"))
    for name, released in leader.engine.release(running, with_kv=True).items():
        assert released.kv is not None
        assert released.kv.parts
        manifest = leader.transfers.offer(version.version, released.kv.tokens, released.kv.data, parts=True)
        assert manifest is not None
        data = other.transfers.fetch(manifest).result(timeout=60)
        continued = replace(released, kv=KV(released.kv.tokens, data))
        other.engine.submit(replace(requests[name], partial=continued))
    moved = finish(other)
    assert moved.keys() == set(running)
    assert_all_same(done | moved | finish(leader), expected)
