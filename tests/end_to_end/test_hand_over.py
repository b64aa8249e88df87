"""Hand-over of trajectories in whole runs: by repack, and after kills of rollouts and placement."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import tomli_w
import torch
from kills import kill
from laminar_runs import CommandServer, LaminarRun, StartRun
from small_runs import EMULATED, make_model

from benchmarks.calibrated import compared, table
from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from infra.kafka.topic_reader import read_topic
from infra.models.checkpoint_folder import load_model
from pipelines.inspect.metrics_file import read_metrics
from schemas.records import Assignment, MoveOutcome, Progress, RepackPlan, Trajectory
from schemas.topics import INBOX, PLANS, PROGRESS, TRAJECTORIES, Topic

R = TypeVar("R")


@pytest.fixture
def client(broker: Broker) -> ClientProperties:
    return ClientProperties.at(broker.bootstrap_servers)


def written(client: ClientProperties, run: LaminarRun, topic: Topic, kind: type[R]) -> Iterator[R]:
    """The records of class `kind` that `run` wrote to `topic`."""
    for record in read_topic(client, topic.name(run.name)):
        yield from (row for row in record.rows if isinstance(row, kind))


def wait_for_progress(client: ClientProperties, run: LaminarRun) -> None:
    """Wait for new progress records."""

    def reports() -> int:
        return sum(1 for _ in written(client, run, PROGRESS, Progress))

    before = reports()
    run.until(lambda: reports() > before, 60, "progress")


def has_reassigned(client: ClientProperties, run: LaminarRun, since: float) -> bool:
    """Whether a trajectory of replica 2 or 3 was assigned to another since then (Unix ms), to be resumed."""
    assignments = list(written(client, run, INBOX, Assignment))
    their_trajectories = {each.trajectory_id for each in assignments if each.replica >= 2}
    later = (each for each in assignments if each.assigned_at > since and each.replica < 2 and each.partial is not None)
    return any(each.trajectory_id in their_trajectories for each in later)


def assert_passed(run: LaminarRun, trained: int) -> None:
    assert run.wait(600) == 0, run.output()
    audit = run.audit()
    assert audit["passed"]
    assert (audit["trained"], audit["lost"], audit["trained_twice"], audit["failed"]) == (trained, 0, 0, 0)


def test_repack_transfers_kv_to_the_destination(
    start_run: StartRun, client: ClientProperties, broker: Broker, run_id: str, tmp_path: Path
) -> None:
    """Two rollouts of the transformers engine hand over trajectories during generation.

    Responses have very different lengths; most take many times as long as a plan and its moves.
    """
    slow_model = make_model(tmp_path / "slow", layers=8)
    run = start_run(
        run_id,
        f"model.path={slow_model}",
        f"kafka.bootstrap_servers={broker.bootstrap_servers}",
        "placement.repack_s=0.1",
        "prompts.heldout=0",
        "prompts.max_new_tokens=400",
        "rollout={processes=2, slots=8, heartbeat_s=0.1}",
        "trainer.optimizer_steps=4",
        "trainer.learner.learning_rate=0",  # all versions equal the first
        "run.allow_no_learning=true",
    )
    assert_passed(run, 4 * 16)
    plans = list(written(client, run, PLANS, RepackPlan))
    planned = {name for plan in plans for move in plan.moves for name in move.trajectory_ids}
    moved = {
        (report.trajectory_id, report.next_owner.lease): report.next_owner.replica
        for report in written(client, run, PROGRESS, Progress)
        if report.next_owner is not None
    }
    assert moved
    assert {name for name, _ in moved} <= planned
    trajectories = list(written(client, run, TRAJECTORIES, Trajectory))
    ended = {(each.trajectory_id, each.lease): each.replica for each in trajectories}
    elsewhere = moved.keys() & ended.keys()
    assert elsewhere
    assert all(moved[key] == ended[key] for key in elsewhere)
    manifests = {
        (each.trajectory_id, each.lease): each.kv
        for each in written(client, run, INBOX, Assignment)
        if each.kv is not None
    }
    assert manifests
    assert manifests.keys() <= moved.keys()
    assert all(manifest.bytes for manifest in manifests.values())
    reports = [each.values for each in read_metrics(run.folder / "metrics.jsonl") if each.name == "rollout"]
    assert max(values.get("kv/reused", 0) for values in reports) > 0
    handed_over = {name for each in written(client, run, PLANS, MoveOutcome) for name in each.handed_over}
    assert handed_over
    assert handed_over <= {name for name, _ in moved}
    model = load_model(slow_model)
    resumed = [each for each in trajectories if (each.trajectory_id, each.lease) in manifests]
    assert resumed
    for each in resumed:
        assert_drawn_from(model, each)
    found = compared(run.folder)  # a prediction that is calibrated from the metrics of a real run
    assert min(found["trained_tokens_per_s"]) > 0  # benchmarks.calibrated shows how near they are
    assert table({run.name: found}).row_count == 1


def assert_drawn_from(model: torch.nn.Module, each: Trajectory) -> None:
    """Check that the logprobs of all tokens, also after a move, are those of `model`."""
    prompt, response = each.prompt.token_ids.to_pylist(), each.response.token_ids.to_pylist()
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)]
    assert np.abs(expected.numpy() - each.response.logprobs.to_numpy()).max() <= 1e-4


@pytest.mark.slow
def test_trajectories_of_a_dead_rollout_resume_elsewhere(
    command_server: CommandServer, client: ClientProperties, broker: Broker, run_id: str, tmp_path: Path
) -> None:
    """Responses take seconds and are reported meanwhile, so each kill hits partial responses.

    One process is stopped instead; when it continues, others own its trajectories, and its output is ignored.
    """
    config = tmp_path / "emulated.toml"
    changes = {
        "run": {"time_scale": 2.0, "layout": "isolated"},
        "kafka": {"bootstrap_servers": broker.bootstrap_servers},
        "rollout": {**EMULATED["rollout"], "processes": 2, "replicas": 2, "progress_tokens": 2, "progress_s": 0.2},
        "placement": {"heartbeat_timeout_s": 3.0},
        "trainer": {"optimizer_steps": 12, "emulation": {"step_s": [[0, 1], [100_000, 2]]}},
    }
    config.write_text(tomli_w.dumps({**EMULATED, **changes}))
    run = LaminarRun(command_server, tmp_path, config, run_id)
    try:
        run.pid_of("rollout-0")  # the topics exist by then
        for name in ("rollout-0", "placement"):
            wait_for_progress(client, run)
            kill(run, name)
        wait_for_progress(client, run)
        stopped_pid, stopped_at = run.pid_of("rollout-1"), 1000 * time.time()
        os.kill(stopped_pid, signal.SIGSTOP)
        run.until(lambda: has_reassigned(client, run, stopped_at), 60, "resumed assignments")
        os.kill(stopped_pid, signal.SIGCONT)
        assert_passed(run, 12 * 32)
    finally:
        run.clean_up()
    resumed = {
        (each.trajectory_id, each.lease): each.partial.token_ids.to_pylist()
        for each in written(client, run, INBOX, Assignment)
        if each.partial is not None
    }
    ended = {
        (each.trajectory_id, each.lease): each.response.token_ids.to_pylist()
        for each in written(client, run, TRAJECTORIES, Trajectory)
    }
    resumed_and_ended = resumed.keys() & ended.keys()
    assert resumed_and_ended
    assert all(ended[key][: len(resumed[key])] == resumed[key] for key in resumed_and_ended)
