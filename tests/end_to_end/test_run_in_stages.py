"""A run whose only replicas have no weights yet: two of them generate the first trajectories together, while their
machines still receive the first version from two sources; later each continues alone. The audit passes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from laminar_runs import Command, CommandServer, kill_processes_in
from small_runs import LENGTH_REWARD, SMALL, make_model
from test_hand_over import assert_drawn_from

from infra.kafka.broker import Broker
from infra.kafka.observer import Observer
from infra.kafka.topic_reader import read_topic
from infra.models.checkpoint_folder import load_model
from infra.store.names import default_root
from infra.store.ownership import remove_store
from pipelines.config import load_config
from pipelines.inspect.audit.audit_run import audit
from pipelines.inspect.run_state.state import fold_all, new_run
from pipelines.run.supervisor import is_reached
from pipelines.run.topics import make_topics
from schemas.records import GroupPlan, RelayStatus, ReplicaStatus, Trajectory
from schemas.topics import PLANS, TRAJECTORIES

STEPS = 2
PACE = "0.5"
"""10^6 bytes per second at the joining machines: the version takes about twelve seconds."""


class StagedRun:
    """The pipelines of a run on four machines: 0 and 1 have the weights, replicas 0 and 1 are on machines 2 and 3."""

    def __init__(self, stack: ExitStack, server: CommandServer, broker: Broker, run: str, model: Path, here: Path):
        self._server, self._here = server, here
        self._roots = [default_root(f"{run}-machine-{machine}") for machine in range(4)]
        for root in self._roots:
            stack.callback(remove_store, root, in_use=True)
        settings = {
            **SMALL,
            "run": {"name": run, "folder": str(here / "runs")},
            "kafka": {"bootstrap_servers": broker.bootstrap_servers},
            "model": {"path": str(model)},
            "prompts": {**SMALL["prompts"], "heldout": 0},
            "trainer": {"optimizer_steps": STEPS, "checkpoint_every": 9},
            "rollout": {"slots": 16, "processes": 2, "heartbeat_s": 0.2},
            "placement": {"stage_min_s": 0.5},
            "relay": {"heartbeat_s": 0.2, "chunk_bytes": 64 << 10, "deltas": False},
        }
        file = here / "config.toml"
        file.write_text(tomli_w.dumps(settings))
        self._file, self.config = file, load_config(file)
        make_topics(self.config)
        self._observer = stack.enter_context(Observer(self.config.kafka.client(), run))
        self._state = new_run(run, STEPS, 0)
        self.commands: list[Command] = []
        self.seen: list[Any] = []

    def submit(self, pipeline: str, machine: int = 0, index: int = 0, *settings: str) -> None:
        name = f"{pipeline}-{index}"
        options = [
            text
            for each in (f"relay.store={self._roots[machine]}", LENGTH_REWARD, *settings)
            for text in ("--set", each)
        ]
        number = "--replica" if pipeline == "rollout" else "--index"
        arguments = (pipeline, str(self._file), *((number, str(index)) if index else ()), *options)
        self.commands.append(Command(self._server, self._here / name, "submit", *arguments))

    def until(self, condition: Callable[[], Any], message: str) -> None:
        """Poll until `condition` is true. Fails if a command ends, or after a time that no run needs."""
        for _ in range(1200):
            if condition():
                return
            rows = list(self._observer.poll(0.2))
            self.seen += rows
            self._state = fold_all(self._state, rows)
            ended = [command for command in self.commands if command.exit_code() is not None]
            assert not ended, "\n".join(command.output()[-3000:] for command in ended)
        raise AssertionError(message + "\n".join(command.output()[-2000:] for command in self.commands))

    def has_version(self, relay: int) -> bool:
        return any(isinstance(row, RelayStatus) and row.relay == relay and row.versions for row in self.seen)

    def reached(self) -> bool:
        return is_reached(self._state, self.config)

    def rows(self, topic: Any, kind: type) -> list[Any]:
        found = read_topic(self.config.kafka.client(), topic.name(self.config.run.name))
        return [row for record in found for row in record.rows if isinstance(row, kind)]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_run_begins_in_stages_and_its_audit_passes(
    command_server: CommandServer, broker: Broker, run_id: str, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", layers=8)
    name = f"{run_id}-{os.getpid()}"
    with ExitStack() as stack:
        run = StagedRun(stack, command_server, broker, name, model, tmp_path)
        stack.callback(lambda: kill_processes_in(list(tmp_path.iterdir())))
        for pipeline in ("placement", "trainer", "relay"):
            run.submit(pipeline)
        run.until(lambda: run.has_version(0), "no version was published")
        run.submit("relay", 1, 1)
        for replica in range(2):
            run.submit("rollout", 2 + replica, replica)
        for pipeline in ("prompts", "score", "experience"):
            run.submit(pipeline)
        replicas = lambda: {row.replica for row in run.seen if isinstance(row, ReplicaStatus)}  # noqa: E731
        run.until(lambda: run.has_version(1) and len(replicas()) == 2, "a source or a replica is missing")
        for machine in (2, 3):
            run.submit("relay", machine, machine, f"relay.max_megabytes_per_s={PACE}")
        run.until(run.reached, "the run did not reach its goal")
        plans = run.rows(PLANS, GroupPlan)
        assert [plan.action for plan in plans][:1] == ["formed"], plans
        stages = plans[0].stages
        assert sorted(stage.replica for stage in stages) == [0, 1]
        whole = min(
            row.sent_at for row in run.seen if isinstance(row, RelayStatus) and row.relay in (2, 3) and row.versions
        )
        trajectories = run.rows(TRAJECTORIES, Trajectory)
        early = [each for each in trajectories if each.finished_at < whole]
        print(f"{len(early)} of {len(trajectories)} trajectories finished before a machine had the version")
        assert early
        assert {each.replica for each in early} == {stages[0].replica}
        published = load_model(model)
        for each in early:
            assert [span.version for span in each.version_spans] == [plans[0].policy_version]
            assert_drawn_from(published, each)
        assert "ended" in {plan.action for plan in plans}
        for command in run.commands:
            command.signal(signal.SIGTERM)
        assert [command.wait() for command in run.commands] == [0] * len(run.commands)
        found = audit(run.config.kafka.client(), name)
        assert found.passed, found
