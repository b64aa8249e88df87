"""Trajectories go on elsewhere in whole runs: by repack, and where rollouts and placement are killed."""

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
from conftest import StartRun
from kills import kill
from laminar_runs import LaminarRun, Nursery
from small_runs import make_model
from test_emulated_run import SMALL

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
    """What `run` has written of `kind`."""
    for record in read_topic(client, topic.name(run.name)):
        yield from (row for row in record.rows if isinstance(row, kind))


def until_told_more(client: ClientProperties, run: LaminarRun) -> None:
    """Wait until placement is told of answers under way."""

    def told() -> int:
        return sum(1 for _ in written(client, run, PROGRESS, Progress))

    before = told()
    run.until(lambda: told() > before, 60, "progress")


def has_given_on(client: ClientProperties, run: LaminarRun, since: float) -> bool:
    """Whether something of replicas 2 and 3 was given to others since, in Unix milliseconds, to go on with."""
    given = list(written(client, run, INBOX, Assignment))
    theirs = {each.trajectory_id for each in given if each.replica >= 2}
    later = (each for each in given if each.assigned_at > since and each.replica < 2 and each.partial is not None)
    return any(each.trajectory_id in theirs for each in later)


def assert_balanced(run: LaminarRun, trained: int) -> None:
    assert run.wait(240) == 0, run.said()
    audit = run.audit()
    assert audit["passed"]
    assert (audit["trained"], audit["lost"], audit["trained_twice"], audit["failed"]) == (trained, 0, 0, 0)


def test_repack_transfers_kv_to_the_destination(
    start_run: StartRun, client: ClientProperties, broker: Broker, run_id: str, tmp_path: Path
) -> None:
    """Two rollouts of the engine that really generates hand trajectories to each other, in the middle of answers.

    Answers of very different lengths, most of which take many times as long as a plan and its moves.
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
        "trainer.learner.learning_rate=0",  # all versions are the first one
    )
    assert_balanced(run, 4 * 16)
    plans = list(written(client, run, PLANS, RepackPlan))
    planned = {name for plan in plans for move in plan.moves for name in move.trajectory_ids}
    moved = {
        (told.trajectory_id, told.next_owner.lease): told.next_owner.replica
        for told in written(client, run, PROGRESS, Progress)
        if told.next_owner is not None
    }
    assert moved
    assert {name for name, _ in moved} <= planned
    trajectories = list(written(client, run, TRAJECTORIES, Trajectory))
    ended = {(each.trajectory_id, each.lease): each.replica for each in trajectories}
    elsewhere = moved.keys() & ended.keys()
    assert elsewhere
    assert all(moved[key] == ended[key] for key in elsewhere)
    parcels = {
        (each.trajectory_id, each.lease): each.kv
        for each in written(client, run, INBOX, Assignment)
        if each.kv is not None
    }
    assert parcels
    assert parcels.keys() <= moved.keys()
    assert all(parcel.bytes for parcel in parcels.values())
    told = [each.values for each in read_metrics(run.folder / "metrics.jsonl") if each.name == "rollout"]
    assert max(values.get("kv/reused", 0) for values in told) > 0
    made = {name for each in written(client, run, PLANS, MoveOutcome) for name in each.handed_over}
    assert made
    assert made <= {name for name, _ in moved}
    model = load_model(slow_model)
    resumed = [each for each in trajectories if (each.trajectory_id, each.lease) in parcels]
    assert resumed
    for each in resumed:
        assert_drawn_from(model, each)


def assert_drawn_from(model: torch.nn.Module, each: Trajectory) -> None:
    """The logprobs of all tokens, those after a move included, are what `model` gives them."""
    prompt, response = each.prompt.token_ids.to_pylist(), each.response.token_ids.to_pylist()
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)]
    assert np.abs(expected.numpy() - each.response.logprobs.to_numpy()).max() <= 1e-4


def test_trajectories_of_a_dead_rollout_resume_elsewhere(
    nursery: Nursery, client: ClientProperties, broker: Broker, run_id: str, tmp_path: Path
) -> None:
    """Answers take seconds and placement is told of them all the while, so each kill meets some half done.

    One process is not killed but stopped; when it comes back others have its work, and it changes nothing.
    """
    config = tmp_path / "emulated.toml"
    changes = {
        "run": {"time_scale": 2.0},
        "kafka": {"bootstrap_servers": broker.bootstrap_servers},
        "rollout": {**SMALL["rollout"], "processes": 2, "replicas": 2, "progress_tokens": 2, "progress_s": 0.2},
        "placement": {"heartbeat_timeout_s": 3.0},
        "trainer": {"optimizer_steps": 4, "emulation": {"step_s": [[0, 1], [100_000, 2]]}},
    }
    config.write_text(tomli_w.dumps({**SMALL, **changes}))
    run = LaminarRun(nursery, tmp_path, config, run_id)
    try:
        run.pid_of("rollout-0")  # then there are topics
        for name in ("rollout-0", "placement"):
            until_told_more(client, run)
            kill(run, name)
        until_told_more(client, run)
        silent, stopped_at = run.pid_of("rollout-1"), 1000 * time.time()
        os.kill(silent, signal.SIGSTOP)
        run.until(lambda: has_given_on(client, run, stopped_at), 60, "its work elsewhere")
        os.kill(silent, signal.SIGCONT)
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
