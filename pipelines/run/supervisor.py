"""A whole run on one machine: broker, warm start, roles, the watch over them, and the end."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace

from infra.kafka.broker import BrokerConfig, start_broker
from infra.kafka.observe import Observer
from infra.kafka.readiness import wait_for_brokers
from infra.store.ownership import remove_store
from pipelines.audit.audit_run import audit
from pipelines.audit.balance import Audit
from pipelines.config import Config, save_config
from pipelines.report.metrics_file import MetricsFile
from pipelines.roles import roles_of
from pipelines.run.fleet import Fleet, RoleFailed
from pipelines.run.goal import is_reached, is_trained
from pipelines.run.state import RunStateFile
from pipelines.run.topics import make_topics
from pipelines.run.warm import PROGRESS_FILE
from pipelines.shards import store_folder
from pipelines.view.events import Role as RoleSeen
from pipelines.view.live import LiveView
from pipelines.view.state import new_run
from pipelines.view.watch import Watch
from schemas.records import Metric

BROKER_WAIT_S = 60.0
DRAIN_S = 5.0
TICK_S = 0.1


class Interrupted(Exception):
    """The run was asked to stop before its goal."""


class Supervisor:
    """Runs `config`, whose run has a name, to its goal; shows it in `view` and leaves everything in the run's folder."""

    def __init__(self, config: Config, view: LiveView, state: RunStateFile) -> None:
        self.config, self.view, self.state = config, view, state
        self.folder = config.run_folder
        self._stop_requests = 0

    def run(self) -> Audit:
        """Run to the end; the books of the run.

        Raises Interrupted, RoleFailed, BrokerStartError, BrokerUnreachable and TopicError: why it cannot go on.
        """
        config, goal = self.config, self.config.trainer.optimizer_steps
        self.config = replace(config, relay=replace(config.relay, store=str(store_folder(config))))
        remove_store(store_folder(self.config))  # what a killed run of this name left; one that is in use is refused
        started = new_run(config.run.name, goal, time.time_ns() // 10**6)
        metrics = MetricsFile(self.folder / "metrics.jsonl")
        with self._signals(), ExitStack() as broker, Watch(started, file=metrics, view=self.view) as watch:
            self._watch = watch
            logs = self.folder / "logs"
            self._fleet = Fleet(self.folder / "config.toml", logs, store_folder(self.config), self.view.note)
            with closing(self._fleet):  # before the broker goes: roles commit as they drain
                self._start_broker(broker)
                self._write_config()
                make_topics(self.config)
                if not self.config.model.path:
                    self._warm_start()
                with Observer(self.config.kafka.client(), self.config.run.name) as observer:
                    watch.source = observer
                    self._train()
                    self._drain()
                    watch.source = None
            self._enter("audit")
            return audit(self.config.kafka.client(), self.config.run.name, ended=True)

    def _start_broker(self, stack: ExitStack) -> None:
        self._enter("broker")
        kafka = self.config.kafka
        if not kafka.bootstrap_servers and not kafka.client_properties:
            broker = stack.enter_context(start_broker(BrokerConfig(self.folder / "kafka"), self.view.note))
            kafka = replace(kafka, bootstrap_servers=broker.bootstrap_servers)
            self.config = replace(self.config, kafka=kafka)
        client = kafka.client()
        wait_for_brokers(client, BROKER_WAIT_S, self.view.note)
        self.state.bootstrap_servers = client.bootstrap_servers
        self.state.client_properties = kafka.client_properties

    def _warm_start(self) -> None:
        self._enter("warm start")
        self._fleet.once("warm-start")
        file = self.folder / PROGRESS_FILE
        told: dict[str, object] = {}
        while (code := self._fleet.members["warm-start"].code) is None:
            self._tick()
            if file.exists() and (now := json.loads(file.read_text())) != told:
                told = now
                values = {name: float(value) for name, value in told.items() if isinstance(value, int | float)}
                self._watch.hear(Metric("warm_start", 0, values, time.time_ns() // 10**6))
        if code:
            raise RoleFailed(f"the warm start failed: see {self.folder / 'logs' / 'warm-start.log'}")
        del self._fleet.members["warm-start"]
        folder = json.loads(file.read_text())["folder"]
        self.config = replace(self.config, model=replace(self.config.model, path=folder))
        self._write_config()

    def _train(self) -> None:
        self._enter("starting")
        for role in roles_of(self.config):
            self._fleet.add(role)
        while not is_reached(self._watch.state, self.config):
            self._tick()
            if is_trained(self._watch.state, self.config):
                self._enter("final evaluation")
            elif self._watch.state.step:
                self._enter("training")

    def _drain(self) -> None:
        """Every role commits what it has and ends; what takes too long is ended by the fleet."""
        self._enter("draining")
        deadline = time.monotonic() + DRAIN_S
        self._fleet.stop([role.name for role in roles_of(self.config)])
        while self._fleet.running() and time.monotonic() < deadline:
            self._fleet.tend(TICK_S)
            self._watch.tick(self._roles())

    def _enter(self, phase: str) -> None:
        if phase != self.state.phase:
            self.state.enter(phase)
            self._watch.phase(phase)

    def _tick(self) -> None:
        if self._stop_requests:
            raise Interrupted
        self._fleet.tend(TICK_S)
        roles = self._roles()
        self.state.see({name: {"pid": r.pid, "restarts": r.restarts, "alive": r.alive} for name, r in roles.items()})
        self._watch.tick(roles)

    def _roles(self) -> dict[str, RoleSeen]:
        return {
            name: RoleSeen(member.pid, member.restarts, member.pid is not None)
            for name, member in self._fleet.members.items()
        }

    def _write_config(self) -> None:
        save_config(self.config, self.folder / "config.toml")

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
