"""Replicas of rollout processes in stage groups: their requests, weights, restarts and end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from in_memory_log import Log, Shard
from record_factories import prompt, shard, topic_input
from scripted_engine import ScriptedBackend, SilentHeartbeats
from staged_replicas import Replica, Replicas, Version, group, lead, model, three_stages
from tiny_engines import run

from operators.io.config import TopicInput
from operators.io.elements import Restored, ShardFold
from operators.io.repartition import Placed
from operators.rollout.config import RolloutConfig
from operators.rollout.generate_trajectories import RolloutFold
from operators.rollout.replica import Replica as ProductReplica
from operators.rollout.running_request import request_of
from operators.rollout.staged.replica_staging import DEAD_END_S
from operators.rollout.transformers_engine import TransformersEngine
from schemas.records import Assignment, AssignmentRejected, Release, Sampling, Trajectory
from schemas.topics import INBOX, RELAY


def product_replica(of: Replica, **options: Any) -> ProductReplica:
    """The replica of a rollout process over the engine and the store of `of`."""
    options |= {"kv_transfers": of.transfers, "staging": of.staging}
    return ProductReplica(of.index, 1, of.engine, of.store, str, lambda: 0, **options)


def assignment(number: int) -> Assignment:
    asked = prompt(number, 1, sampling=Sampling(1.0, 1.0, 0, 12, (), 3))
    return Assignment(asked, 0, 1, 1, 0, 1, None, None, 0)


def test_replica_hands_its_group_over_with_kv_to_a_whole_one(replicas: Replicas, version: Version) -> None:
    made = three_stages(replicas, version)
    leading, other = (product_replica(each) for each in (made[0], made[3]))
    made[3].whole(version)
    other.announce(version.version, version.manifest)
    for number in range(4):
        leading.accept(assignment(number))
    events = [event for _ in range(4) for event in leading.step()]
    assert leading.state == "running"
    order = Release("plan", tuple(f"p{number}.0" for number in range(4)), (2,) * 4, 3, 1, 0, 1)
    events += leading.hand_over(order)
    placed = [event for event in events if isinstance(event, Placed)]
    assert len(placed) == 4
    for each in placed:
        other.accept(each.assignment)
    done: list[Trajectory] = []
    while len(done) < 4:
        done += [event for event in other.step() if isinstance(event, Trajectory)]
    assert (other.kv.reused, other.kv.recomputed) == (4, 0)
    assert {each.version_spans[0].version for each in done} == {version.version}
    whole = TransformersEngine(model(seed=7), slots=16, version=version.version)
    expected = run(whole, [request_of(assignment(number)) for number in range(4)])
    assert [each.response.token_ids.to_pylist() for each in sorted(done, key=lambda each: each.prompt.number)] == [
        expected[f"p{number}.0"].generated.token_ids.tolist() for number in range(4)
    ]


def test_replica_leaves_its_group_for_a_newer_whole_version(
    replicas: Replicas, version: Version, tmp_path: Path
) -> None:
    made = three_stages(replicas, version)
    newer = Version(tmp_path, number=2, seed=9)
    leading = product_replica(made[0])
    leading.announce(version.version, version.manifest)
    leading.accept(assignment(0))
    leading.step()
    made[0].whole(newer)
    leading.announce(newer.version, newer.manifest)
    done: list[Trajectory] = []
    while not done:
        assert leading.engine.version == version.version
        done += [event for event in leading.step() if isinstance(event, Trajectory)]
    assert [span.version for span in done[0].version_spans] == [version.version]
    leading.step()
    assert leading.engine.version == newer.version
    assert not made[0].staging.status(0).leads


def test_interrupted_requests_are_rejected_if_nothing_was_loaded(
    replicas: Replicas, version: Version, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer version was evicted after the group had ended. No stage may start during a load."""
    made = three_stages(replicas, version)
    newer = Version(tmp_path, number=2, seed=9)
    leading = product_replica(made[0], interrupts=True)
    leading.announce(version.version, version.manifest)
    leading.accept(assignment(0))
    leading.step()
    made[0].whole(newer)
    leading.announce(newer.version, newer.manifest)
    claims, locked = made[0].staging.member.claims, []
    monkeypatch.setattr(leading._weights, "load", lambda version: bool(locked.append(claims._lock.locked())))
    (rejected,) = [event for event in leading.step() if isinstance(event, AssignmentRejected)]
    assert (rejected.trajectory_id, rejected.reason, rejected.retry) == ("p0.0", "weight version 1.2 is gone", True)
    assert (leading.idle, leading.engine.version, locked) == (True, None, [True])


def test_restarted_rollout_leads_a_group_of_an_earlier_version(
    replicas: Replicas, version: Version, tmp_path: Path
) -> None:
    leader, member, before = replicas(3)
    started = iter([before, leader])

    def restore(restored: Restored) -> ShardFold:
        return RolloutFold(
            RolloutConfig(),
            [product_replica(next(started))],
            SilentHeartbeats(),  # type: ignore[arg-type]
            ScriptedBackend(),  # type: ignore[arg-type]
            state=restored.state,
        )

    log = Log()
    rollout = Shard(log, shard("rollout", TopicInput(INBOX, (0,), start="latest"), topic_input(RELAY)), restore)
    log.append(RELAY, Version(tmp_path, number=0, seed=5).manifest)
    log.append(RELAY, version.manifest)
    rollout.start()
    rollout.run(2)
    rollout.start()
    rollout.run()
    leader.arrive(version, (0, 1), ends=True, announced=False)
    member.arrive(version, (2, 3, 4))
    lead(leader, group(version, [leader.stage(0, 2), member.stage(2, 5)]))
    assert leader.staging.status(0).leads, leader.staging.status(0).error


def test_broken_group_of_an_abandoned_version_ends(
    replicas: Replicas, version: Version, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = three_stages(replicas, version)
    newer = Version(tmp_path, number=2, seed=9)
    leading, now = product_replica(made[0]), [100.0]
    monkeypatch.setattr(made[0].staging, "_clock", lambda: now[0])
    leading.announce(version.version, version.manifest)
    for number in range(2):
        leading.accept(assignment(number))
    leading.step()
    made[1].die()
    while leading.engine.due() == 0:
        leading.step()
    now[0] += 2 * DEAD_END_S
    assert leading.step() == []  # its parts are here: placement may find another member
    made[0].abandon(version)
    assert leading.step() == []
    now[0] += DEAD_END_S
    rejected = [event for event in leading.step() if isinstance(event, AssignmentRejected)]
    assert [(each.trajectory_id, each.lease, each.retry) for each in rejected] == [("p0.0", 1, True), ("p1.0", 1, True)]
    assert rejected[0].reason.endswith("replicas gone: [1], and weight version 1.1 no longer arrives")
    assert (leading.idle, leading.engine.version, made[0].staging.status(0).group) == (True, None, "")
    made[0].whole(newer)
    leading.announce(newer.version, newer.manifest)
    leading.step()
    assert leading.engine.version == newer.version
