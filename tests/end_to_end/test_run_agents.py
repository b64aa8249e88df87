"""A run whose episodes are played by agents over HTTP, with the client of the package openai."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from laminar_runs import LaminarRun, StartRun
from small_runs import make_model

from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from infra.kafka.topic_reader import read_topic
from schemas.records import Experience, Trajectory, TurnEnded, TurnRequest
from schemas.topics import EXPERIENCES, INBOX, PROGRESS, TRAJECTORIES

STEPS = 2
AGENT = f"{Path(__file__).with_name('talking_agent.py')}:talk"


@pytest.fixture(scope="module")
def run(start_run: StartRun, broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> LaminarRun:
    model = make_model(tmp_path_factory.mktemp("model") / "model", layers=1)
    changes = (
        f"kafka.bootstrap_servers={broker.bootstrap_servers}",
        f"model.path={model}",
        "prompts.environment=agent",
        "prompts.heldout=0",
        "prompts.max_new_tokens=200",
        f"agents.function={AGENT}",
        "agents.concurrency=4",
        "score.rewards=[{name='environment'}]",
        f"trainer.optimizer_steps={STEPS}",
    )
    run = start_run(
        "agents-run", f"kafka.bootstrap_servers={broker.bootstrap_servers}", f"model.path={model}", *changes
    )
    assert run.wait(240) == 0, run.output()
    return run


def records(broker: Broker, run: LaminarRun, topic, kind):
    found = read_topic(ClientProperties.at(broker.bootstrap_servers), topic.name(run.name))
    return [row for record in found for row in record.rows if isinstance(row, kind)]


def test_run_with_agents_trains_and_passes_the_audit(run: LaminarRun, broker: Broker) -> None:
    audit = run.audit()
    assert audit["passed"]
    assert (audit["trained"], audit["lost"], audit["failed"]) == (STEPS * 16, 0, 0)
    requests, ended = records(broker, run, INBOX, TurnRequest), records(broker, run, PROGRESS, TurnEnded)
    assert {each.turn_id for each in ended} <= {each.turn_id for each in requests}
    rewards = {each.trajectory.trajectory_id: each.reward for each in records(broker, run, EXPERIENCES, Experience)}
    for trajectory in records(broker, run, TRAJECTORIES, Trajectory):
        turns = [each for each in ended if each.trajectory_id == trajectory.trajectory_id]
        assert len(turns) == 3
        drawn = trajectory.response.loss_mask.to_pylist()
        assert drawn[0]
        assert trajectory.error is None
        told = json.loads(trajectory.text)
        assert told["drawn"] == sum(drawn)  # the client's usage
        assert rewards[trajectory.trajectory_id] == told["reward"]
