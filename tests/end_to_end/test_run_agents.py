"""A run whose episodes are played by agents over HTTP with the package openai, and whose roles are killed meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from first_day import CHAT_TEMPLATE
from kills import kill
from laminar_runs import LaminarRun, StartRun
from served_process import Served

from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from infra.kafka.topic_reader import read_topic
from infra.listening import exposed_addresses, listening_sockets
from operators.io.episode_keys import ADDRESS_FILE
from pipelines.config import load_config
from schemas.records import Experience, MicroBatch, TurnEnded, TurnRequest
from schemas.topics import BATCHES, EXPERIENCES, INBOX, PROGRESS, Topic

STEPS = 1
BATCH = 8
REPOSITORY = Path(__file__).parents[2]
AGENT = f"{Path(__file__).with_name('talking_agent.py')}:talk"
KILLS = {2: "gateway-0", 5: "rollout-0"}
"""The role to kill once so many turns have ended."""
SOCKETS: set[tuple[str, int]] = set()
"""The listening sockets of all processes, before each kill."""
ALL_KILLS = {**KILLS, 8: "agents-0", 11: "placement"}


@pytest.fixture(scope="module", params=[KILLS, pytest.param(ALL_KILLS, marks=pytest.mark.soak)], ids=["two", "all"])
def run(
    start_run: StartRun,
    broker: Broker,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    model_folder: Path,
) -> LaminarRun:
    """Its agents report after all kills: on a busy machine its only step would end before."""
    kills: dict[int, str] = request.param
    hold = tmp_path_factory.mktemp("agents") / "hold"
    hold.touch()
    model = hold.with_name("model")
    shutil.copytree(model_folder, model)
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    run = start_run(
        f"agents-{len(kills)}-kills",
        f"kafka.bootstrap_servers={broker.bootstrap_servers}",
        f"model.path={model}",
        "run.layout=isolated",
        "prompts.environment=agent",
        "prompts.heldout=0",
        "prompts.max_new_tokens=300",
        f"agents.function={AGENT}",
        f"agents.env={{LAMINAR_TEST_HOLD='{hold}'}}",
        "agents.concurrency=4",
        "agents.retries=0",  # an agent that gets an error fails the episode; the kill of its role is no attempt
        "gateway.branches=all",
        "gateway.processes=2",  # they share the port: the other one answers while gateway-0 restarts
        "score.rewards=[{name='environment'}]",
        f"trainer.optimizer_steps={STEPS}",
        f"experience.global_batch={BATCH}",
    )
    for role in ("gateway-0", "gateway-1"):  # the topics exist by then
        run.until(lambda role=role: _listens(run, role), 100, f"{role} at the port of the run")
    for count, role in kills.items():
        run.until(lambda count=count: len(records(broker, run, PROGRESS, TurnEnded)) >= count, 200, f"{count} turns")
        SOCKETS.update(listening_sockets(run.processes()))
        kill(run, role)
    hold.unlink()
    assert run.wait(240) == 0, run.output()
    return run


def _listens(run: LaminarRun, role: str) -> bool:
    with suppress(FileNotFoundError):
        port = json.loads((run.folder / ADDRESS_FILE).read_text())["port"]
        return ("127.0.0.1", port) in listening_sockets([psutil.Process(run.pid_of(role))])
    return False


def records(broker: Broker, run: LaminarRun, topic: Topic, kind: type) -> list[Any]:
    """The records of class `kind` that `run` wrote to `topic`."""
    found = read_topic(ClientProperties.at(broker.bootstrap_servers), topic.name(run.name))
    return [row for record in found for row in record.rows if isinstance(row, kind)]


def test_sockets_of_a_run_with_agents_are_on_loopback(run: LaminarRun) -> None:
    port = json.loads((run.folder / ADDRESS_FILE).read_text())["port"]
    assert ("127.0.0.1", port) in SOCKETS
    assert not exposed_addresses(SOCKETS)


def test_episodes_of_agents_are_trained_in_spite_of_kills(run: LaminarRun) -> None:
    audit = run.audit()
    assert audit["passed"]
    assert (audit["trained"], audit["lost"], audit["trained_twice"], audit["failed"]) == (STEPS * BATCH, 0, 0, 0)


def test_trajectory_has_the_tokens_and_reward_of_its_agent(run: LaminarRun, broker: Broker) -> None:
    requests, ended = records(broker, run, INBOX, TurnRequest), records(broker, run, PROGRESS, TurnEnded)
    assert {each.turn_id for each in ended} <= {each.turn_id for each in requests}
    experiences = records(broker, run, EXPERIENCES, Experience)
    assert len(experiences) >= STEPS * BATCH
    for each in experiences:
        trajectory = each.trajectory
        assert trajectory.error is None
        drawn, seen = trajectory.response.loss_mask.to_pylist(), json.loads(trajectory.text)
        aside = trajectory.conversations[1].start
        assert trajectory.conversations[0].prompt_tokens > len("<user><assistant>")  # the template's bytes
        assert drawn[0]
        assert [sum(drawn[:aside]), sum(drawn[aside:])] == [seen["drawn"], seen["aside"]]  # the usage in its responses
        messages = json.loads(trajectory.conversations[0].messages)
        assert [said["content"] for said in messages if said["role"] == "assistant"] == seen["texts"]
        assert each.conversation_rewards == (seen["reward"], 0.25)
        assert each.reward == (seen["reward"] + 0.25) / 2


def test_batch_and_commands_have_the_rewards_of_conversations(run: LaminarRun, broker: Broker) -> None:
    experiences = records(broker, run, EXPERIENCES, Experience)
    rewards = {each.trajectory.trajectory_id: list(each.conversation_rewards) for each in experiences}
    trained: dict[str, list[float]] = {}
    for part in records(broker, run, BATCHES, MicroBatch):
        own = part.context_rewards.to_pylist()
        trained |= {name: own[2 * at : 2 * at + 2] for at, name in enumerate(part.trajectory_ids)}
    assert trained == {name: rewards[name] for name in trained}
    name = next(iter(trained))
    command = [sys.executable, "-c", "from pipelines.cli.main import main; main()", "trajectory", name, "--json"]
    path = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    shown = subprocess.run(command, cwd=run.here, env=path, capture_output=True, text=True, check=True, timeout=120)
    turns = json.loads(shown.stdout)["turns"]["turns"]
    assert [each["reward"] for each in turns] == [0.25, None, rewards[name][0]]


@pytest.mark.slow
def test_versions_that_the_store_has_evicted_are_served(run: LaminarRun, tmp_path: Path) -> None:
    """The ended run has no store: the initial model and the final one are pulled from their folders."""
    served = Served(load_config(run.folder / "config.toml"), tmp_path / "work")
    try:
        for name in ("v0", "v1"):
            served.ask(name, name)
        answers = [served.answer(name) for name in ("v0", "v1")]
        assert [version for _, version in answers] == ["1.0", "1.1"]
        served.ask("other", "v9")
        assert served.event()["error"] == "the run has no weight version 'v9'; it can serve 1.0, 1.1"
        assert {each.name for each in (tmp_path / "work").iterdir()} == {"1", "2"}
    finally:
        assert served.close() == 0
        shutil.rmtree(run.weights_folder(), ignore_errors=True)
