"""The supervisor of a run on one machine: broker, warm start, roles, their monitoring, drain and audit."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path

from infra.clocks import wall_ms
from infra.files import write_atomically
from infra.kafka.admin import TopicError
from infra.kafka.observer import Observer
from infra.kafka.readiness import BrokerUnreachable
from infra.processes import last_line
from infra.store.errors import StoreBusy
from infra.store.ownership import open_folder, remove_store
from operators.relay.config import AUTO
from pipelines.config import Config, ConfigError, ConfigProblems, save_config
from pipelines.inspect.audit.audit_run import audit
from pipelines.inspect.audit.result import Audit
from pipelines.inspect.log.chunks import rows_of
from pipelines.inspect.metrics_file import LAG, PHASE, REPLICA, MetricsFile
from pipelines.inspect.run_files import CONFIG_FILE, LOGS, METRICS_FILE, SAMPLES_FILE, ZYGOTE_LOG
from pipelines.inspect.run_state.events import RoleState as ObservedRole
from pipelines.inspect.run_state.goal import is_evaluated, is_reached, is_trained
from pipelines.inspect.run_state.refused import refused
from pipelines.inspect.run_state.state import RunState, fold_all, new_run
from pipelines.inspect.run_times import downtime_s
from pipelines.present.report.samples import report_samples
from pipelines.present.report.trackers import Sinks, open_trackers
from pipelines.present.view.live import LiveView
from pipelines.present.view.watch import Watch
from pipelines.roles import ADMIN, EMULATED, is_of_pipeline, processes_of
from pipelines.run.background_audit import BackgroundAudit
from pipelines.run.elastic_split import TRAINER, ElasticSplit
from pipelines.run.fleet import Fleet, RoleFailed
from pipelines.run.held_folder import HeldFolder
from pipelines.run.local_scaling import FollowedTarget, follow_target, with_rollouts
from pipelines.run.resharding import reshard_roles
from pipelines.run.run_guard import COLUMNS, RunFailing, RunGuard
from pipelines.run.run_kafka import RunKafka
from pipelines.run.state import RunStateFile
from pipelines.run.stop_requests import Interrupted, StopRequests
from pipelines.run.topics import check_kafka, make_topics
from pipelines.run.trial_result import CHECK_FILE, RESULT_FILE, TRIAL, TRIAL_CONFIG_FILE, read_check, read_trial
from pipelines.run.upgrade import upgrade_resumed
from pipelines.run.warm_start import PROGRESS_FILE, find_warm_start
from pipelines.run.zygote_process import wait_for_zygote
from pipelines.shards import own_store_folder, store_folder
from schemas.records import Metric
from schemas.topics import CATALOGUE, EXPERIENCES

DRAIN_S = 5.0
STOP_CHECKPOINT_S = 60.0
"""How long a stopped run waits for the trainer's checkpoint of the newest version; a second request ends the wait."""
INTERRUPTED_STOP_S = 1.5
"""How long the broker may take to stop after a stop request or an error."""
TICK_S = 0.1
CLEANUP_S = 10.0
"""How long the cleanup after a killed run may take."""


Resume = Callable[[], None]


class Supervisor:
    """Runs `config`, which has a run name, to its goal; shows it in `view`, writes all files to the run's folder.

    `stops` must be entered already. A run with `resume` has its topics, and its local broker if it had one; `resume` is
    called when the check of the user's code has passed.
    """

    def __init__(
        self, config: Config, view: LiveView, state: RunStateFile, stops: StopRequests, resume: Resume | None = None
    ) -> None:
        self.config, self.view, self.state = config, view, state
        self._resumed, self._checked = resume is not None, resume or (lambda: None)
        self.folder, self._held = config.run_folder, HeldFolder(config.run_folder)
        self._stops = stops
        self._warm_start_progress: Mapping[str, object] = {}
        self._kafka = RunKafka(config.kafka, self.folder / "kafka", view.note)
        self._audits: BackgroundAudit | None = None
        self._target: FollowedTarget | None = None
        """The number of rollout processes, if this machine's follow an autoscaler."""
        self._split: ElasticSplit | None = None
        """The devices of trainer and rollouts, if these share them."""
        self._started_at = wall_ms()
        self._guard = RunGuard(config, self.folder / CONFIG_FILE, self._started_at)
        self._is_log_read = False
        """Whether all metrics that were in the log at the start are in the state."""

    def run(self) -> Audit:
        """Run to the goal, drain and audit the run.

        Raises Interrupted, RoleFailed, RunFailing, ConfigError, BrokerStartError, BrokerUnreachable, TopicError and
        RunFolderDeleted.
        """
        run = self.config.run
        started_at = int(self.state.started_at * 1000)
        started = new_run(run.name, self.config.trainer.optimizer_steps, started_at, run.warn_steps, self.folder)
        trackers = open_trackers(self.config.run.trackers, self.config.run.name, self.folder)
        file = MetricsFile(self.folder / METRICS_FILE)
        started = fold_all(started, [each for each in file.recent if each.name not in (LAG, PHASE, REPLICA)])
        started = replace(started, down_ms=int(1000 * downtime_s(self.state.phases)))
        metrics = Sinks(file, trackers)
        with Watch(started, file=metrics, view=self.view) as self._watch, ExitStack() as stack:
            self._claim_store(stack)
            stack.callback(self._kafka.close, INTERRUPTED_STOP_S)
            self._fleet = stack.enter_context(closing(self._open_fleet()))  # ends before the broker: roles commit
            stack.push(self._keep_newest)
            self._prepare()
            client, name = self.config.kafka.client(), self.config.run.name
            observer = Observer(client, name, positions=file.position, refuse=refused)
            with closing(self._open_audits()) as self._audits, observer:
                self._watch.source = observer
                with self._followed_target() as self._target:
                    self._train()
                self._target = None
                self._drain()
                self._watch.source = None
            self._fleet.close()
            self._enter("audit")
            with self._stops.interruptible():
                timeout_s = self.config.kafka.transaction_timeout_s
                result = self._kafka.retry(lambda: audit(client, name, ended=True, transaction_timeout_s=timeout_s))
                self._kafka.retry(self._write_samples)
            self._kafka.close()
        return result

    def _claim_store(self, stack: ExitStack) -> None:
        """Set the weight store's folder, remove what a killed process of this run has left in it, and hold it open.

        So it is in use when all roles restart at once, too. `stack` removes it with its files.
        """
        if not wait_for_zygote(log := self.folder / LOGS / ZYGOTE_LOG, self._stops.check):
            raise ConfigError(f"a process of the run's last start has not ended: the one that has {log} open")
        store = own_store_folder(self.config)
        deadline = time.monotonic() + (CLEANUP_S if self._resumed else 0.0)
        while (busy := _in_use(store)) is not None:
            if time.monotonic() > deadline:
                raise ConfigError(store_in_use(self.config, busy))
            self._stops.check()
            time.sleep(TICK_S)
        stack.callback(open_folder(store, self.folder).release)
        stack.callback(remove_store, store, in_use=True)
        self.config = replace(self.config, relay=replace(self.config.relay, store=str(store)))

    def _open_fleet(self) -> Fleet:
        return Fleet(
            self.folder / CONFIG_FILE,
            self.folder / LOGS,
            store_folder(self.config),
            self.view.note,
            model=EMULATED if self.config.emulated else self.config.model.path,
            excused=lambda: not self._kafka.answers(),
        )

    def _keep_newest(self, kind: type[BaseException] | None, *_: object) -> None:
        """After a stop request in training: let the trainer end its batch and write a checkpoint of the newest version.

        All other roles end meanwhile. Without Kafka the trainer cannot end by itself, so nothing waits for it.
        """
        if kind is not Interrupted or self.state.phase not in ("training", "final evaluation"):
            return
        trainers = [name for name in self._fleet.members if is_of_pipeline(name, TRAINER)]
        deadline = time.monotonic() + STOP_CHECKPOINT_S
        self._fleet.stop(trainers)
        # After SIGTERM a rollout might first hand its work over.
        self._fleet.stop([name for name in self._fleet.members if name not in trainers], signal.SIGINT)
        with suppress(BrokerUnreachable, TopicError, RoleFailed):  # the stop request is what ends the run
            while set(trainers) & {*self._fleet.running()} and time.monotonic() < deadline:
                if self._stops.repeated or not self._kafka.answers():
                    return
                self._fleet.poll(TICK_S)

    def _followed_target(self) -> AbstractContextManager[FollowedTarget | None]:
        """The target of the autoscaler, if it scales the processes of this machine."""
        scaling = self.config.autoscaling
        if scaling is None or scaling.actuator != "local":
            return nullcontext()
        return closing(self._kafka.retry(lambda: FollowedTarget(self.config, scaling)))

    def _open_audits(self) -> BackgroundAudit:
        every_s = self.config.run.audit_every_s
        return BackgroundAudit(self.folder / CONFIG_FILE, every_s, self.view.note, self.state.set_audit)

    def _prepare(self) -> None:
        """Prepare what roles need: Kafka, topics, a model, and config.toml with their addresses.

        Kafka is started, or connected to, while the check of the user's code loads its libraries; a local broker whose
        jars must be fetched is started after the check, so that a mistake is shown before.
        """
        self._start_trial()
        for prepare in [self._connect, self._finish_trial][:: -1 if self._kafka.fetches_broker else 1]:
            prepare()
        with self._stops.interruptible():
            make_topics(self.config, self.view.note)
            self._kafka.topics = frozenset(topic.name(self.config.run.name) for topic in CATALOGUE.values())
            if self._resumed:
                self._kafka.retry(lambda: reshard_roles(self.config, self.view.note))
                self._kafka.retry(lambda: upgrade_resumed(self.config, self.view.note))
        self.state.bootstrap_servers = self.config.kafka.client().bootstrap_servers
        self.state.client_properties = self.config.kafka.for_role(ADMIN).client_properties
        save_config(self.config, self.folder / CONFIG_FILE)
        if not self.config.model.path and not self.config.emulated:
            self._warm_start()

    def _connect(self) -> None:
        """Start the local broker, or wait for the configured cluster, and check it."""
        self._enter("broker")
        with self._stops.interruptible():
            self._kafka.start()
            self.config = replace(self.config, kafka=self._kafka.config)
            if not self._resumed:
                self._kafka.refuse_existing(self.config.run.name)
            check_kafka(self.config)

    def _start_trial(self) -> None:
        """Start the check of prompts, rewards and environments."""
        file = self.folder / TRIAL_CONFIG_FILE
        for name in (RESULT_FILE, CHECK_FILE):
            (self.folder / name).unlink(missing_ok=True)
        save_config(self.config, file)
        self._fleet.run_job(TRIAL, file)

    def _finish_trial(self) -> None:
        """Wait for the check. Raises ConfigProblems with all its problems, RoleFailed if it ended without a result."""
        self._read_check()
        self._enter("checks")
        while self._fleet.members[TRIAL].wanted:
            self._read_check()
            self._tick()
        self._end_job(TRIAL, "the check of prompts, rewards and environments failed")
        found = read_trial(self.folder / RESULT_FILE)
        for warning in found.warnings:
            self.view.note(f"warning: {warning}")
        if found.problems:
            raise ConfigProblems(found.problems)
        self._checked()

    def _read_check(self) -> None:
        """Report to the watch which check runs, if it changed."""
        check = read_check(self.folder / CHECK_FILE)
        if check is not None and check != self._watch.state.check:
            self._watch.start_check(check)

    def _warm_start(self) -> None:
        self._enter("warm start")
        if (found := find_warm_start(self.config)) is not None:
            write_atomically(self.folder / PROGRESS_FILE, json.dumps(found))
            self._use_warm_start()
            return
        self._fleet.run_job("warm-start")
        while self._fleet.members["warm-start"].wanted:
            self._tick()
            self._read_warm_start_progress()
        self._end_job("warm-start", "the warm start failed")
        self._use_warm_start()

    def _end_job(self, name: str, failed: str) -> None:
        """Forget a job that has ended. Raises RoleFailed with what `failed` if it did."""
        if self._fleet.members.pop(name).code:
            log = self.folder / LOGS / f"{name}.log"
            raise RoleFailed(f"{failed}: {last_line(log)} (see {log})")

    def _use_warm_start(self) -> None:
        folder = self._read_warm_start_progress()["folder"]
        self.config = replace(self.config, model=replace(self.config.model, path=str(folder)))
        save_config(self.config, self.folder / CONFIG_FILE)

    def _read_warm_start_progress(self) -> Mapping[str, object]:
        """Read the warm start's progress file, and report it to the watch if it changed."""
        file = self.folder / PROGRESS_FILE
        progress = json.loads(file.read_text()) if file.exists() else {}
        if progress != self._warm_start_progress:
            self._warm_start_progress = progress
            values = {name: float(value) for name, value in progress.items() if isinstance(value, int | float)}
            self._watch.add(Metric("warm_start", 0, values, wall_ms()))
        return progress

    def _train(self) -> None:
        self._enter("starting")
        target = self._target  # a resumed run has the processes of the last decision
        if target is not None and target.devices:
            ranks = target.devices - target.target
            self._set_ranks(ranks)
            self._split = ElasticSplit(self._fleet, target.devices, ranks, self._set_ranks, self.view.note)
        processes = processes_of(self.config)
        if target is not None:
            processes = with_rollouts(processes, target.target)
        for process in processes:
            self._fleet.add(process)
        # A resumed run has steps from the beginning: it has started when a replica reports.
        while not self._watch.state.step or (self._resumed and not self._watch.state.replicas):
            if is_reached(self._watch.state, self.config):
                break
            self._tick()
        self._enter("training")
        while not is_trained(self._watch.state, self.config):
            self._tick()
        if is_evaluated(self.config):
            self._enter("final evaluation")
        while not is_reached(self._watch.state, self.config):
            self._tick()

    def _set_ranks(self, ranks: int) -> None:
        """Let the trainer's ranks have this number from their next start on."""
        self.config = replace(self.config, trainer=replace(self.config.trainer, ranks=ranks))
        save_config(self.config, self.folder / CONFIG_FILE)

    def _drain(self) -> None:
        """Stop all roles: each commits its outputs and ends. The fleet kills those that exceed the time limit.

        SIGINT, because after SIGTERM rollouts might hand their work over, which nobody needs any more.
        """
        self._enter("draining")
        deadline = time.monotonic() + DRAIN_S
        self._fleet.stop([*self._fleet.members], signal.SIGINT)
        while self._fleet.running() and time.monotonic() < deadline:
            self._tick()
        self._watch.read_to_end(2.0)

    def _write_samples(self) -> None:
        """Write samples for the report, while the run's broker responds."""
        client, name = self.config.kafka.client(), self.config.run.name
        found = report_samples(client, name, Path(self.config.model.path) if self.config.model.path else None)
        write_atomically(self.folder / SAMPLES_FILE, json.dumps(found, indent=1))

    def _enter(self, phase: str) -> None:
        if phase != self.state.phase:
            self.state.enter_phase(phase)
            self._watch.start_phase(phase)

    def _tick(self) -> None:
        self._held.check()
        with self._stops.interruptible():
            self._kafka.poll()
        if self._target is not None:
            notice_s, target = self.config.rollout.termination_notice_s, self._target.target
            if self._split is not None:
                target = self._split.follow(target)
            follow_target(self._fleet, target, self.view.note, notice_s)
        self._fleet.poll(TICK_S)
        if self._audits is not None:
            self._audits.poll()
        roles = self._roles()
        self.state.set_roles({name: {**asdict(role), "alive": role.alive} for name, role in roles.items()})
        state = self._watch.tick(roles)
        if self._kafka.topics:  # else no role works yet, and a local broker may not have started
            self._check_errors(state)

    def _check_errors(self, state: RunState) -> None:
        """Raise RunFailing if the run cannot learn, once its samples are written."""

        def read(since_ms: int) -> Iterable[Mapping[str, object]]:
            return rows_of(self.config.kafka.client(), self.config.run.name, EXPERIENCES, COLUMNS, since_ms)

        if (earlier := not self._is_log_read) and self._watch.source is not None:
            self._is_log_read = self._watch.source.caught_up()
        with self._stops.interruptible():
            try:
                self._kafka.retry(lambda: self._guard.check(state, read, earlier))
            except RunFailing:
                self._kafka.retry(self._write_samples)
                raise

    def _roles(self) -> Mapping[str, ObservedRole]:
        return {
            name: ObservedRole(member.pid, member.restarts, member.status)
            for name, member in self._fleet.members.items()
        }


def _in_use(store: Path) -> StoreBusy | None:
    """Remove `store`; if a process uses it, return that error instead."""
    try:
        remove_store(store)
    except StoreBusy as error:
        return error
    return None


def store_in_use(config: Config, busy: StoreBusy) -> str:
    """Why a run of `config` cannot start while another process has its weight store, and what to do."""
    if config.relay.store != AUTO:
        return f"relay.store: {busy}. Set another relay.store, or stop that run"
    name = config.run.name
    return f"run {name!r} is active on this machine: {busy}. Choose another name with --name, or stop that run"
