"""A whole run on one machine: broker, warm start, roles, the watch over them, the end, and what is left behind."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

from infra.kafka.broker import BrokerConfig, start_broker
from infra.kafka.observe import Observer
from infra.kafka.readiness import wait_for_brokers
from pipelines.config import Config, save_config
from pipelines.roles import roles_of
from pipelines.run.fleet import Fleet, RoleFailed
from pipelines.run.goal import Goal
from pipelines.run.state import RunStateFile
from pipelines.run.topics import make_topics
from pipelines.run.warm import PROGRESS_FILE
from pipelines.shards import store_folder
from schemas.records import Metric

log = logging.getLogger(__name__)

BROKER_WAIT_S = 60.0
DRAIN_S = 5.0
TICK_S = 0.1


class Interrupted(Exception):
    """The run was asked to stop before its goal."""


class LocalRun:
    """Runs `config` to its goal. `screen` shows it; everything is left in the run's folder."""

    def __init__(self, config: Config, screen: "Screen") -> None:
        folder = config.run_folder
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        self.config = config
        self.screen = screen
        self.state = RunStateFile(folder, config.run.name, config.trainer.optimizer_steps)
        self.folder = folder
        self._stop_requests = 0

    def run(self) -> None:
        """Run to the end. Raises Interrupted, RoleFailed, BrokerUnreachable and what else keeps a run from going on."""
        point_latest(self.folder)
        self.state.write()
        with self._signals(), ExitStack() as broker:
            self._prepare_config()
            fleet = Fleet(self.folder / "config.toml", self.folder / "logs", store_folder(self.config), self.screen.note)
            with closing(fleet):  # before the broker goes: roles commit as they drain
                self._broker(broker)
                self._write_config()
                make_topics(self.config)
                if self.config.warm_start is not None and not self.config.model.path:
                    self._warm_start(fleet)
                with Observer(self.config.kafka.client(), self.config.run.name) as observer:
                    self._train(fleet, observer)
                    self._drain(fleet, observer)
            self.state.enter("audit")
            self.screen.finish(self)

    # -- phases -------------------------------------------------------------------------------------------------------

    def _prepare_config(self) -> None:
        relay = replace(self.config.relay, store=str(store_folder(self.config)))
        self.config = replace(self.config, relay=relay)

    def _write_config(self) -> None:
        save_config(self.config, self.folder / "config.toml")

    def _broker(self, stack: ExitStack) -> None:
        self.state.enter("broker")
        kafka = self.config.kafka
        if not kafka.bootstrap_servers and not kafka.client_properties:
            broker = stack.enter_context(start_broker(BrokerConfig(self.folder / "kafka"), self.screen.note))
            kafka = replace(kafka, bootstrap_servers=broker.bootstrap_servers)
            self.config = replace(self.config, kafka=kafka)
        client = kafka.client()
        wait_for_brokers(client, BROKER_WAIT_S, self.screen.note)
        self.state.bootstrap_servers = client.bootstrap_servers
        self.state.client_properties = kafka.client_properties
        self.state.write()

    def _warm_start(self, fleet: Fleet) -> None:
        self.state.enter("warm start")
        fleet.once("warm-start")
        file = self.folder / PROGRESS_FILE
        shown = ""
        while True:
            self._tend(fleet)
            if file.exists() and (text := file.read_text()) != shown:
                shown = text
                self.screen.warm_start(json.loads(text))
            if fleet.members["warm-start"].code is not None:
                break
        if fleet.members.pop("warm-start").code:
            raise RoleFailed(f"the warm start failed: see {self.folder / 'logs' / 'warm-start.log'}")
        made = json.loads(file.read_text())
        self.config = replace(self.config, model=replace(self.config.model, path=made["folder"]))
        self._write_config()

    def _train(self, fleet: Fleet, observer: Observer) -> None:
        self.state.enter("starting")
        for role in roles_of(self.config):
            fleet.add(role)
        goal = Goal(self.config)
        with (self.folder / "metrics.jsonl").open("a") as metrics:
            while not goal.reached:
                self._tend(fleet)
                self._watch(observer, metrics.write, goal, fleet)
                metrics.flush()

    def _drain(self, fleet: Fleet, observer: Observer) -> None:
        """In pipeline order, so that each finds its inputs complete; what runs too long is ended by the fleet."""
        self.state.enter("draining")
        deadline = time.monotonic() + DRAIN_S
        names = [role.name for role in roles_of(self.config)]
        fleet.stop(names)
        while fleet.running() and time.monotonic() < deadline:
            fleet.tend(TICK_S)

    # -- the watch ----------------------------------------------------------------------------------------------------

    def _tend(self, fleet: Fleet) -> None:
        if self._stop_requests:
            raise Interrupted
        fleet.tend(TICK_S)
        roles = {
            name: {"pid": member.pid, "restarts": member.restarts, "alive": member.pid is not None}
            for name, member in fleet.members.items()
        }
        if roles != self.state.roles:
            self.state.roles = roles
            self.state.write()

    def _watch(self, observer: Observer, write: Callable[[str], object], goal: Goal, fleet: Fleet) -> None:
        for record in observer.poll():
            if isinstance(record, Metric):
                goal.see(record)
                line = {"name": record.name, "step": record.step, "values": record.values}
                write(json.dumps({**line, "measured_at": record.measured_at}) + "\n")
            self.screen.see(record)
        if goal.phase != self.state.phase:
            self.state.enter(goal.phase)
        self.screen.update(self.state, observer.lag())

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def stop(number: int, frame: object) -> None:
            self._stop_requests += 1
            if self._stop_requests > 2:
                os._exit(130)  # asked three times: the zygote cleans up behind us

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
