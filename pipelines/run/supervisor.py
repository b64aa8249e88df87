"""A whole run on one machine: broker, warm start, roles, the watch over them, and the end."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path

from infra.files import write_atomically
from infra.kafka.observe import Observer
from infra.store.errors import StoreBusy
from infra.store.ownership import remove_store
from pipelines.config import ADMIN, Config, ConfigError, save_config
from pipelines.inspect.audit.audit_run import audit
from pipelines.inspect.audit.result import Audit
from pipelines.inspect.metrics_file import LAG, PHASE, MetricsFile
from pipelines.inspect.run_state.events import RoleState as RoleSeen
from pipelines.inspect.run_state.state import fold_all, new_run
from pipelines.present.report.trackers import Sinks, open_trackers
from pipelines.present.view.live import LiveView
from pipelines.present.view.watch import Watch
from pipelines.roles import EMULATED, roles_of
from pipelines.run.background_audit import BackgroundAudit
from pipelines.run.fleet import Fleet, RoleFailed, last_line
from pipelines.run.goal import is_evaluated, is_reached, is_trained
from pipelines.run.run_kafka import RunKafka
from pipelines.run.state import RunStateFile
from pipelines.run.stop_requests import StopRequests
from pipelines.run.topics import make_topics
from pipelines.run.warm_start import PROGRESS_FILE, find_warm_start
from pipelines.shards import store_folder
from schemas.records import Metric
from schemas.topics import CATALOGUE

DRAIN_S = 5.0
HURRIED_S = 1.5
"""How long the broker may take to stop once somebody waits for the run to be gone."""
TICK_S = 0.1
GUARDED_S = 10.0
"""How long those who clean up behind a run that was killed may take, at most."""
CONFIG_FILE = "config.toml"


class RunFolderDeleted(RuntimeError):
    """What the run leaves has no place any more."""


class Supervisor:
    """Runs `config`, whose run has a name, to its goal; shows it in `view`, leaves everything in the run's folder.

    `stops` hears requests to stop already. A run that is `resumed` has its topics, and maybe a broker of its own.
    """

    def __init__(
        self, config: Config, view: LiveView, state: RunStateFile, stops: StopRequests, *, resumed: bool = False
    ) -> None:
        self.config, self.view, self.state = config, view, state
        self._resumed = resumed
        self.folder = config.run_folder
        self._stops = stops
        self._told_of_warm_start: Mapping[str, object] = {}
        self._kafka = RunKafka(config.kafka, self.folder / "kafka", view.note)
        self._audits: BackgroundAudit | None = None

    def run(self) -> Audit:
        """Run to the end; the books of the run.

        Raises Interrupted, RoleFailed, ConfigError, BrokerStartError, BrokerUnreachable, TopicError and
        RunFolderDeleted: why it cannot go on.
        """
        started = new_run(self.config.run.name, self.config.trainer.optimizer_steps, int(self.state.started_at * 1000))
        trackers = open_trackers(self.config.run.trackers, self.config.run.name, self.folder)
        file = MetricsFile(self.folder / "metrics.jsonl")
        started = fold_all(started, [each for each in file.recent if each.name not in (LAG, PHASE)])
        metrics = Sinks(file, trackers)
        with Watch(started, file=metrics, view=self.view) as self._watch, ExitStack() as stack:
            self._claim_store()
            stack.callback(self._kafka.close, HURRIED_S)
            self._fleet = stack.enter_context(closing(self._open_fleet()))  # ends before the broker: roles commit
            self._prepare()
            client, name = self.config.kafka.client(), self.config.run.name
            observer = Observer(client, name, positions=file.position)
            with closing(self._open_audits()) as self._audits, observer:
                self._watch.source = observer
                self._train()
                self._drain()
                self._watch.source = None
            self._fleet.close()
            self._enter("audit")
            with self._stops.interruptible():
                balance = audit(self.config.kafka.client(), self.config.run.name, ended=True)
            self._kafka.close()
        return balance

    def _claim_store(self) -> None:
        """Settle where weights go, and clear what a run of this name has left there when it was killed."""
        store = store_folder(self.config)
        deadline = time.monotonic() + (GUARDED_S if self._resumed else 0.0)
        while (busy := _in_use(store)) is not None:
            if time.monotonic() > deadline:
                raise ConfigError(f"a run {self.config.run.name!r} is at work on this machine: {busy}")
            self._stops.check()
            time.sleep(TICK_S)
        self.config = replace(self.config, relay=replace(self.config.relay, store=str(store)))

    def _open_fleet(self) -> Fleet:
        return Fleet(
            self.folder / CONFIG_FILE,
            self.folder / "logs",
            store_folder(self.config),
            self.view.note,
            model=EMULATED if self.config.emulated else self.config.model.path,
            excused=lambda: not self._kafka.answers(),
        )

    def _open_audits(self) -> BackgroundAudit:
        every_s = self.config.run.audit_every_s
        return BackgroundAudit(self.folder / CONFIG_FILE, every_s, self.view.note, self.state.audited)

    def _prepare(self) -> None:
        """Everything that roles need: Kafka, topics, a model, and the configuration that says where they are."""
        self._enter("broker")
        with self._stops.interruptible():
            self._kafka.start()
            self.config = replace(self.config, kafka=self._kafka.config)
            if not self._resumed:
                self._kafka.refuse_known(self.config.run.name)
            make_topics(self.config, self.view.note)
            self._kafka.topics = frozenset(topic.name(self.config.run.name) for topic in CATALOGUE.values())
        self.state.bootstrap_servers = self.config.kafka.client().bootstrap_servers
        self.state.client_properties = self.config.kafka.for_role(ADMIN).client_properties
        self._write_config()
        if not self.config.model.path and not self.config.emulated:
            self._warm_start()

    def _warm_start(self) -> None:
        self._enter("warm start")
        if (found := find_warm_start(self.config)) is not None:
            write_atomically(self.folder / PROGRESS_FILE, json.dumps(found))
            self._use_warm_start()
            return
        self._fleet.once("warm-start")
        while (job := self._fleet.members["warm-start"]).wanted:
            self._tick()
            self._hear_warm_start()
        if job.code:
            log = self.folder / "logs" / "warm-start.log"
            raise RoleFailed(f"the warm start failed: {last_line(log)} (see {log})")
        del self._fleet.members["warm-start"]
        self._use_warm_start()

    def _use_warm_start(self) -> None:
        folder = self._hear_warm_start()["folder"]
        self.config = replace(self.config, model=replace(self.config.model, path=str(folder)))
        self._write_config()

    def _hear_warm_start(self) -> Mapping[str, object]:
        """What its progress file says now; the watch hears it where it is new."""
        file = self.folder / PROGRESS_FILE
        told = json.loads(file.read_text()) if file.exists() else {}
        if told != self._told_of_warm_start:
            self._told_of_warm_start = told
            values = {name: float(value) for name, value in told.items() if isinstance(value, int | float)}
            self._watch.add(Metric("warm_start", 0, values, time.time_ns() // 10**6))
        return told

    def _train(self) -> None:
        self._enter("starting")
        for role in roles_of(self.config):
            self._fleet.add(role)
        while not self._watch.state.step:
            self._tick()
        self._enter("training")
        while not is_trained(self._watch.state, self.config):
            self._tick()
        if is_evaluated(self.config):
            self._enter("final evaluation")
        while not is_reached(self._watch.state, self.config):
            self._tick()

    def _drain(self) -> None:
        """Every role commits what it has and ends; what takes too long is ended by the fleet."""
        self._enter("draining")
        deadline = time.monotonic() + DRAIN_S
        self._fleet.stop([role.name for role in roles_of(self.config)])
        while self._fleet.running() and time.monotonic() < deadline:
            self._tick()

    def _enter(self, phase: str) -> None:
        if phase != self.state.phase:
            self.state.enter(phase)
            self._watch.start_phase(phase)

    def _tick(self) -> None:
        if not self.folder.is_dir():
            raise RunFolderDeleted(
                f"the run's folder {self.folder} has been deleted while the run was at work: its checkpoints and the "
                "broker's data, where it had one of its own, are gone with it. Start another run"
            )
        with self._stops.interruptible():
            self._kafka.tend()
        self._fleet.tend(TICK_S)
        if self._audits is not None:
            self._audits.tend()
        roles = self._roles()
        self.state.see({name: {**asdict(role), "alive": role.alive} for name, role in roles.items()})
        self._watch.tick(roles)

    def _roles(self) -> Mapping[str, RoleSeen]:
        return {
            name: RoleSeen(member.pid, member.restarts, member.status) for name, member in self._fleet.members.items()
        }

    def _write_config(self) -> None:
        save_config(self.config, self.folder / CONFIG_FILE)


def _in_use(store: Path) -> StoreBusy | None:
    """Who keeps `store` from being removed; else it is."""
    try:
        remove_store(store)
    except StoreBusy as error:
        return error
    return None
