"""All pipelines of a run submitted separately by `laminar submit`, on each runner, until SIGTERM.

Their Kafka has authentication: each connects over TLS as its own user, with only the ACLs of `laminar acls`.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w
from first_day import Shell
from laminar_runs import Command, CommandServer, kill_processes_in
from small_runs import SMALL

from infra.kafka.broker import Broker, BrokerConfig, start_broker
from infra.kafka.observer import Observer
from infra.kafka.topic_reader import read_topic
from infra.listening import exposed_addresses, listening_sockets
from infra.runners.flink import running_flink
from infra.runners.options import RunnerName
from infra.store.names import default_root
from infra.store.ownership import remove_store
from pipelines.config import Config, load_config
from pipelines.inspect.audit.audit_run import audit
from pipelines.inspect.run_files import AUDIT_FILE
from pipelines.inspect.run_folders import read_run
from pipelines.inspect.run_state.goal import is_reached
from pipelines.inspect.run_state.state import fold_all, new_run
from pipelines.roles import PIPELINES
from pipelines.run.topics import make_topics
from schemas import records as r
from schemas.topics import (
    BATCHES,
    EVAL_PROMPTS,
    EXPERIENCES,
    INBOX,
    PROMPTS,
    RELAY,
    REPLICAS,
    TRAJECTORIES,
    Topic,
    group_name,
)

STEPS = 2
WRITES: Mapping[str, tuple[Topic, type]] = {
    "prompts": (PROMPTS, r.Prompt),
    "placement": (INBOX, r.Assignment),
    "rollout": (TRAJECTORIES, r.Trajectory),
    "score": (EXPERIENCES, r.Experience),
    "experience": (BATCHES, r.MicroBatch),
    "trainer": (RELAY, r.WeightVersion),
    "evaluation": (EVAL_PROMPTS, r.Prompt),
    "relay": (REPLICAS, r.RelayStatus),
}
"""By pipeline: a topic and a record class that only this pipeline writes there."""


def write_config(folder: Path, run: str, broker: Broker, model: Path) -> Path:
    """Write the configuration of a run whose pipelines will be submitted."""
    address = (
        {"client_properties": str(broker.config.security.properties_file("{role}"))}
        if broker.config.secure
        else {"bootstrap_servers": broker.bootstrap_servers}
    )
    settings = {
        "run": {"name": run, "folder": str(folder / "runs")},
        "kafka": address,
        "model": {"path": str(model)},
        "trainer": {"optimizer_steps": STEPS},
    }
    (folder / "config.toml").write_text(tomli_w.dumps({**SMALL, **settings}))
    return folder / "config.toml"


@pytest.fixture(scope="module")
def config(broker: Broker, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("config"), "never-submitted", broker, model_folder)


def submit(command_server: CommandServer, here: Path, *arguments: str) -> Command:
    return Command(command_server, here, "submit", *arguments)


@dataclass(frozen=True)
class Submitted:
    """A run whose pipelines were submitted separately."""

    config: Config
    commands: Mapping[str, Command]

    def wait(self, seconds: float = 240.0) -> None:
        for command in self.commands.values():
            command.until(lambda c=command: "start 1 of " in c.output(), 180, "its start")  # type: ignore[misc]
        state, deadline = new_run(self.config.run.name, STEPS, 0), time.monotonic() + seconds
        with Observer(self.config.kafka.client(), self.config.run.name) as observer:
            while not is_reached(state, self.config):
                state = fold_all(state, observer.poll(0.2))
                all_up = all(command.exit_code() is None for command in self.commands.values())
                if not all_up or time.monotonic() > deadline:
                    outputs = "\n".join(
                        f"{name}: {command.output()[-2000:]}" for name, command in self.commands.items()
                    )
                    raise AssertionError(
                        f"the run is at step {state.step}, with evaluation {state.evaluation}\n{outputs}"
                    )

    def rows(self, topic: Topic, kind: type) -> list[Any]:
        found = read_topic(self.config.kafka.client(), topic.name(self.config.run.name))
        return [row for record in found for row in record.rows if isinstance(row, kind)]


@pytest.fixture(scope="module")
def secure_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    config = BrokerConfig(tmp_path_factory.mktemp("secure"), secure=True, users=PIPELINES)
    with start_broker(config) as running:
        yield running


@pytest.fixture(scope="module")
def submitted(
    runner: RunnerName,
    secure_broker: Broker,
    command_server: CommandServer,
    model_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Submitted]:
    folder, run = tmp_path_factory.mktemp(runner), f"submitted-{runner}"
    file = write_config(folder, run, secure_broker, model_folder)
    make_topics(load_config(file))
    admin = secure_broker.config.security.properties_file("admin")
    acls = Command(command_server, folder / "acls", "acls", run, "--apply", "--command-config", str(admin))
    assert acls.wait() == 0, acls.output()
    with running_flink() if runner == "flink" else nullcontext() as endpoint:  # one for all pipelines
        options = ("--", f"--job_endpoint={endpoint}") if endpoint else ()
        commands = {
            pipeline: submit(command_server, folder / pipeline, pipeline, str(file), "--runner", runner, *options)
            for pipeline in PIPELINES
        }
        try:
            submitted = Submitted(load_config(file), commands)
            submitted.wait()
            yield submitted
        finally:
            kill_processes_in(command.here for command in commands.values())
            remove_store(default_root(run), in_use=True)


def test_submitted_pipelines_run_until_they_are_stopped(
    submitted: Submitted, runner: RunnerName, command_server: CommandServer, tmp_path: Path
) -> None:
    check_that_all_listen_on_loopback_only(submitted, runner)
    check_that_commands_find_the_pipelines(submitted, Shell(command_server, tmp_path / "here", tmp_path))
    for pipeline in PIPELINES:
        assert submitted.rows(*WRITES[pipeline]), pipeline
    *most, last = PIPELINES
    for pipeline in most:
        submitted.commands[pipeline].signal(signal.SIGTERM)
        check_that_it_ended(submitted, pipeline)
    stop = Command(command_server, tmp_path, "runs", "stop", "--run", str(submitted.config.run_folder))
    assert (stop.wait(), "stopped" in stop.output()) == (0, True)
    assert "the audit passed" in stop.output()  # as at the end of `laminar run`
    check_that_it_ended(submitted, last)
    assert json.loads((submitted.config.run_folder / AUDIT_FILE).read_text())["trained"] == STEPS * 16
    found = read_run(submitted.config.run_folder)
    assert (found.status, {role["status"] for role in found.state["roles"].values()}) == ("ended", {"ended"})
    audited = audit(submitted.config.kafka.client(), submitted.config.run.name)
    assert audited.passed
    assert audited.trained == STEPS * 16
    assert audited.evaluated == 32  # eight questions, greedy and sampled, of the first and the last version


def check_that_all_listen_on_loopback_only(submitted: Submitted, runner: RunnerName) -> None:
    """The pipelines, their children, the secure broker, Prism, and Flink with its job servers."""
    processes = [process for command in submitted.commands.values() for process in command.processes()]
    sockets = listening_sockets(processes)
    assert sockets
    assert not exposed_addresses(sockets)
    others = listening_sockets(psutil.Process().children(recursive=True))
    assert others > sockets
    print(f"{runner}: {len(others)} listening sockets")
    assert not exposed_addresses(others)


def check_that_commands_find_the_pipelines(submitted: Submitted, shell: Shell) -> None:
    """The run, its Kafka and its processes, by its folder."""
    place = ("--run", str(submitted.config.run_folder))
    status = shell("runs", "status", *place, "--json").json
    assert (status["status"], status["optimizer_steps"], status["kafka"]) == ("running", STEPS, None)
    pids = {name: role["pid"] for name, role in status["roles"].items() if role["status"] == "up"}
    commands = submitted.commands.items()
    assert {name.removesuffix("-0"): pid for name, pid in pids.items()} == {name: each.pid for name, each in commands}
    assert re.search(r"^  score +up, pid \d+", shell("runs", "status", *place).text, re.M)
    assert "experience" in shell("topics", "lag", *place).text
    assert re.search(r"^p\d+  chain_sum, ", shell("samples", *place, "-n", "1").text, re.M)
    assert f"{STEPS}/{STEPS} steps" in shell("watch", "--plain", *place).text
    audited = shell("runs", "audit", *place)
    assert (audited.code, "the audit passed" in audited.text) == (0, True), audited.text
    assert "no role of run" in shell("runs", "resume", *place).text


def check_that_it_ended(submitted: Submitted, pipeline: str) -> None:
    command = submitted.commands[pipeline]
    assert command.wait(60) == 0, command.output()
    assert f"start 1 of {group_name(submitted.config.run.name, pipeline)}" in command.output()
    assert "start 2 of" not in command.output()
    assert "Traceback" not in command.output()
    assert not command.processes()


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (("scores", "CONFIG"), 2, "'scores' is not a pipeline; did you mean 'score'? Choose one of autoscaler"),
        (("score", "nowhere.toml"), 2, "config file nowhere.toml does not exist"),
        (("score", "CONFIG", "--set", "run.name=''"), 2, "run.name is not set"),
        (
            ("rollout", "CONFIG", "--replica", "8"),
            2,
            "would host replica 8 (rollout.replicas), but the inbox topic has 8 par",
        ),
        (("score", "CONFIG", "--replica", "1"), 2, "--replica is only for rollout"),
        (("trainer", "CONFIG", "--set", "model.path=''"), 2, "model.path is not set"),
        (("score", "CONFIG", "--runner", "spark"), 2, "spark"),
    ],
)
def test_submit_exits_with_2_for_configuration_errors(
    arguments: tuple[str, ...], code: int, expected: str, command_server: CommandServer, config: Path, tmp_path: Path
) -> None:
    """So neither a respawner nor a process manager starts the role again."""
    command = submit(
        command_server, tmp_path, *(str(config) if argument == "CONFIG" else argument for argument in arguments)
    )
    assert command.wait(30) == code
    assert expected in " ".join(command.output().replace("│", " ").split())
