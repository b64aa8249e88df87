"""Trajectories go on elsewhere in whole runs: by repack, and where rollouts and placement are killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import tomli_w
from kills import kill
from laminar_runs import LaminarRun, Nursery
from test_emulated_run import SMALL

from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from infra.kafka.reading import read_topic
from schemas.records import Assignment, Progress, RepackPlan, Trajectory
from schemas.topics import INBOX, PLANS, PROGRESS, TRAJECTORIES, Topic

R = TypeVar("R")


@pytest.fixture
def client(broker: Broker) -> ClientProperties:
    return ClientProperties.at(broker.bootstrap_servers)


def written(client: ClientProperties, run: LaminarRun, topic: Topic, kind: type[R]) -> Iterator[R]:
    """What `run` has written of `kind`."""
    for record in read_topic(client, topic.name(run.name)):
        yield from (row for row in record.rows if isinstance(row, kind))


def told(client: ClientProperties, run: LaminarRun) -> int:
    """How often placement was told of answers under way."""
    return sum(1 for _ in written(client, run, PROGRESS, Progress))


def assert_balanced(run: LaminarRun, trained: int) -> None:
    assert run.wait(150) == 0, run.said()
    audit = run.audit()
    assert audit["balanced"]
    assert (audit["trained"], audit["lost"], audit["trained_twice"], audit["failed"]) == (trained, 0, 0, 0)


def test_repack_moves_what_then_finishes_elsewhere(
    nursery: Nursery, client: ClientProperties, broker: Broker, run_id: str, tmp_path: Path
) -> None:
    config = tmp_path / "emulated.toml"
    changes = {
        "run": {"time_scale": 20.0},
        "kafka": {"bootstrap_servers": broker.bootstrap_servers},
        "placement": {"repack_s": 0.1},
        "rollout": {**SMALL["rollout"], "heartbeat_s": 0.1},
        "trainer": {"optimizer_steps": 6, "emulation": {"step_s": [[0, 1], [100_000, 2]]}},
    }
    config.write_text(tomli_w.dumps({**SMALL, **changes}))
    run = LaminarRun(nursery, tmp_path, config, run_id)
    try:
        assert_balanced(run, 6 * 32)
    finally:
        run.end()
    plans = list(written(client, run, PLANS, RepackPlan))
    planned = {name for plan in plans for move in plan.moves for name in move.trajectory_ids}
    moved = {
        (told.trajectory_id, told.next_owner.lease): told.next_owner.replica
        for told in written(client, run, PROGRESS, Progress)
        if told.next_owner is not None
    }
    assert moved
    assert {name for name, _ in moved} <= planned
    ended = {(each.trajectory_id, each.lease): each.replica for each in written(client, run, TRAJECTORIES, Trajectory)}
    elsewhere = moved.keys() & ended.keys()
    assert elsewhere
    assert all(moved[key] == ended[key] for key in elsewhere)
    with_kv = {
        (each.trajectory_id, each.lease) for each in written(client, run, INBOX, Assignment) if each.kv is not None
    }
    assert with_kv
    assert with_kv <= moved.keys()


def test_what_a_killed_rollout_had_goes_on_from_what_it_had(
    nursery: Nursery, client: ClientProperties, broker: Broker, run_id: str, tmp_path: Path
) -> None:
    """Answers take seconds and placement is told of them all the while, so each kill meets some half done."""
    config = tmp_path / "emulated.toml"
    changes = {
        "run": {"time_scale": 2.0},
        "kafka": {"bootstrap_servers": broker.bootstrap_servers},
        "rollout": {**SMALL["rollout"], "processes": 2, "replicas": 2, "progress_tokens": 2, "progress_s": 0.2},
        "trainer": {"optimizer_steps": 4, "emulation": {"step_s": [[0, 1], [100_000, 2]]}},
    }
    config.write_text(tomli_w.dumps({**SMALL, **changes}))
    run = LaminarRun(nursery, tmp_path, config, run_id)
    try:
        run.pid_of("rollout-0")  # then there are topics
        for name in ("rollout-0", "placement", "rollout-1"):
            seen = told(client, run)
            run.until(lambda seen=seen: told(client, run) > seen, 60, "progress")
            kill(run, name)
        assert_balanced(run, 4 * 32)
    finally:
        run.end()
    resumed = {
        (each.trajectory_id, each.lease): each.partial.token_ids.to_pylist()
        for each in written(client, run, INBOX, Assignment)
        if each.partial is not None
    }
    ended = {
        (each.trajectory_id, each.lease): each.response.token_ids.to_pylist()
        for each in written(client, run, TRAJECTORIES, Trajectory)
    }
    gone_on = resumed.keys() & ended.keys()
    assert gone_on
    assert all(ended[key][: len(resumed[key])] == resumed[key] for key in gone_on)
