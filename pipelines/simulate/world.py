"""One history of a run: every role on a simulated cluster, with the faults of the history, under its invariants."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from infra.kafka.simulated_clients import SimulatedClients
from infra.kafka.simulated_consumer import CommitSignals
from infra.kafka.simulated_producer import EncodeForRelease, SimulatedRecord, as_it_is
from infra.kafka.topic_reader import schema_of
from infra.simulation.brokers import SimulatedBrokers
from infra.simulation.cluster import Place, SimulatedCluster
from infra.simulation.network import Network, SimulatedConnection
from infra.simulation.process import SimulatedProcess
from infra.simulation.scheduler import EventScheduler
from infra.simulation.streams import Streams
from pipelines.config import Config
from pipelines.shards import partitions_of
from pipelines.simulate.faults import Fault
from pipelines.simulate.hosts import SimulatedHosts
from pipelines.simulate.injection import FaultInjector
from pipelines.simulate.invariants import Invariants, InvariantViolated, audit_cluster
from pipelines.simulate.observer import Committed, LogObserver, event_text
from pipelines.simulate.simulated_role import SimulatedRole
from pipelines.simulate.trained_content import TrainedContent
from pipelines.simulate.transfers import Transfers
from pipelines.simulate.wiring import Wiring
from schemas.codec import Headers, as_version, versions_of
from schemas.identity import parse_trajectory_id
from schemas.topics import CATALOGUE, PROMPTS


class EarlierRelease:
    """Writes each class of records at an earlier version, which `streams` draws once, where its fields fit that."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._versions: dict[str, int] = {}

    def __call__(self, value: bytes, headers: Headers) -> tuple[bytes, Headers]:
        """Value and headers as this release writes them."""
        schema = schema_of(headers)
        version = self._versions.get(schema)
        if version is None:
            versions = versions_of(schema)
            earlier = versions[:-1] or versions
            version = self._streams.of("earlier release", schema).choice(earlier) if earlier else 0
            self._versions[schema] = version
        return as_version(value, headers, version)


FAULTS_UNTIL_S = 25.0
"""No fault begins after this time."""
CALM_S = 240.0
"""How long after the last fault a run may take to finish: the bound of the liveness check. A run with a goal finishes
with its final version, whatever is outstanding then; the audit finds what is lost."""

COMPACTED_SHARE = 0.5
"""Share of the histories in which the broker compacts topics of which only the newest records of keys are needed."""
COMPACT_EVERY_S = 3
SKEWED_SHARE = 0.25
"""Share of the histories in which the clocks of hosts are wrong by minutes."""
MAX_SKEW_S = 600.0


@dataclass
class SimulatedHistory:
    """What happened. `failure` is None for a history without a defect."""

    seed: int
    shape: str
    faults: tuple[Fault, ...]
    failure: str | None = None
    ended_s: float = 0.0
    requests: int = 0
    records: int = 0
    digest: str = ""
    """A hash of all committed records of all topics, and of their times."""
    events: list[tuple[float, str, str]] = field(default_factory=list)
    """Time, role and what happened; empty unless they were recorded."""
    state: list[str] = field(default_factory=list)
    """The state of the run where it was stopped before its end."""


class World:
    """A run with `faults`. `run` plays it to its end, to second `until`, or to the first violation."""

    def __init__(
        self,
        config: Config,
        roles: Sequence[Wiring],
        history: SimulatedHistory,
        *,
        record_events: bool = False,
        relays: int = 0,
        trainer_apart: bool = False,
        until: float = math.inf,
        step_s: float = math.inf,
        at_step: Callable[[SimulatedHistory], None] = lambda history: None,
    ) -> None:
        """With `trainer_apart` the trainer has a host without a relay. `at_step` is called after each `step_s` seconds,
        with the events and the state so far."""
        self.config, self.history, self._until = config, history, until
        self._step_s, self._at_step = step_s, at_step
        self.scheduler = EventScheduler()
        self.cluster = SimulatedCluster(
            {topic.name(config.run.name): len(partitions_of(config, topic)) for topic in CATALOGUE.values()}
        )
        self.streams = Streams(history.seed)
        self.brokers = SimulatedBrokers(self.cluster, lambda: self.scheduler.now)
        self.network = Network(self.scheduler, self.streams, self.brokers)
        self._signals = CommitSignals(self.cluster, self.scheduler)
        self.invariants = Invariants(config, calm=not history.faults)
        upgraded = any(fault.kind == "upgrade_run" for fault in history.faults)
        self.release: EncodeForRelease = EarlierRelease(self.streams) if upgraded else as_it_is
        self._records = record_events
        self._digest = hashlib.blake2b(digest_size=16)
        LogObserver(self.cluster, config.run.name, self._committed, self._digest_message)
        trained = TrainedContent(self.invariants.batches)
        content_of = str if config.emulated_training else lambda version: trained.after(version.number)
        place = "trainer-host" if trainer_apart else "host-0"
        self.hosts = SimulatedHosts(relays, self.scheduler, self.streams, content_of, place) if relays else None
        if self.hosts is not None:
            self.hosts.published = self.invariants.manifests
        self.transfers = None if self.hosts is None else Transfers(config, self.hosts, self.fail)
        self._compacts = self.streams.of("compaction").random() < COMPACTED_SHARE
        self._clocks_are_wrong = self.streams.of("clocks").random() < SKEWED_SHARE
        self._skews: dict[str, float] = {}
        self.roles = {each.role.name: SimulatedRole(self, each) for each in roles}
        self.network.trace = lambda name, request, fault: self.event(name, f"request {request} {fault}")

    def run(self) -> SimulatedHistory:
        """Play the history."""
        history, scheduler = self.history, self.scheduler
        self.start_roles()
        injector = FaultInjector(self)
        for fault in history.faults:
            scheduler.at(fault.at, lambda fault=fault: injector.inject(fault))  # type: ignore[misc]
        self._tick()
        calm_at = max((fault.at + fault.seconds for fault in history.faults), default=0.0)
        end = min(calm_at + CALM_S, self._until)
        try:
            while scheduler.now + self._step_s < end and not scheduler.stopped:
                scheduler.run(until=scheduler.now + self._step_s)
                history.state = list(self.invariants.state_lines())
                self._at_step(history)
            history.state = []
            scheduler.run(until=end)
            if history.failure is None and (scheduler.stopped or self._until > calm_at + CALM_S):
                self._check_end()
            elif history.failure is None:
                history.state = list(self.invariants.state_lines())
        except InvariantViolated as violated:
            self.fail(str(violated))
        finally:
            history.ended_s, history.requests = scheduler.now, self.network.requests
            history.digest = self._digest.hexdigest()
            for each in self.roles.values():
                each.end()
            scheduler.close()
            self.close()
        return history

    def close(self) -> None:
        """Remove the hosts' files; only a world that was not run to its end needs it."""
        if self.hosts is not None:
            self.hosts.close()

    def skew_s(self, host: str) -> float:
        """By how much the clock of a host is wrong."""
        if host not in self._skews:
            drawn = self.streams.of(host, "host's clock").uniform(-MAX_SKEW_S, MAX_SKEW_S)
            self._skews[host] = drawn if self._clocks_are_wrong else 0.0
        return self._skews[host]

    def start_roles(self) -> None:
        """Start every role within half a second."""
        for name, role in self.roles.items():
            self.scheduler.after(0.5 * self.streams.of(name, "first start").random(), role.start)

    def change_roles(self, config: Config, roles: Sequence[Wiring]) -> None:
        """The run goes on with `config` and its roles, all of which have ended."""
        self.config = config
        before = self.roles
        self.roles = {}
        for each in roles:
            role = self.roles[each.role.name] = before.get(each.role.name) or SimulatedRole(self, each)
            role.wiring = each
        self.start_roles()

    def fail(self, reason: str) -> None:
        """End the history with its first failure."""
        if self.history.failure is None:
            self.history.failure = reason
            self.event("world", reason)
        self.scheduler.stop()

    def event(self, role: str, text: str) -> None:
        """Record what happened to `role`."""
        if self._records:
            self.history.events.append((self.scheduler.now, role, text))

    def connect(self, process: SimulatedProcess) -> SimulatedClients:
        """The clients of a process."""
        return SimulatedClients(self.cluster, SimulatedConnection(self.network, process), self._signals, self.release)

    def _digest_message(self, place: Place, offset: int, message: SimulatedRecord) -> None:
        fields = ", ".join(f"{name}={value!r}" for name, value in message._asdict().items())
        line = f"{self.scheduler.now:.6f} {place} {offset} Message({fields})\n"  # whatever the class is called
        if self.hosts is not None:  # what depends on this process: its number, and where the stores are
            line = line.replace(str(self.hosts.folder), "").replace(f'"pid":{os.getpid()},', "")
        self._digest.update(line.encode())

    def _committed(self, committed: Committed) -> None:
        if self.history.failure is not None:
            return
        self.history.records += 1
        if self._records and (text := event_text(committed.record)):
            self.event(committed.topic, text)
        try:
            self.invariants.add(committed)
        except InvariantViolated as violated:
            self.fail(str(violated))

    def _tick(self) -> None:
        """Each second: the cluster's clock, its time-outs, and whether all is done."""
        self.cluster.now = self.scheduler.now
        self.cluster.expire()
        if self._compacts and round(self.scheduler.now) % COMPACT_EVERY_S == 0:
            self._compact()
        if self.hosts is not None and (invalid := self.hosts.invalid_versions()):
            self.fail(f"visible with other bytes than the trainer's: {', '.join(invalid)}")
        if self.hosts is not None and (invalid := self.hosts.invalid_checkpoints()):
            self.fail(f"checkpoints that do not hold the weights of their version: {', '.join(invalid)}")
        last_fault = max((fault.at + fault.seconds for fault in self.history.faults), default=0.0)
        if self.scheduler.now > last_fault and self._is_done():
            self.scheduler.stop()
            return
        self.scheduler.after(1.0, self._tick)

    def _compact(self) -> None:
        for topic in CATALOGUE.values():
            if topic.retention == "newest":
                for partition in self.cluster.partitions_of(topic.name(self.config.run.name)):
                    log = self.cluster.log(Place(topic.name(self.config.run.name), partition))
                    log.compact(attrgetter("key"))

    def _is_done(self) -> bool:
        """Whether the goal is reached, or every prompt is drawn and what is left fills no batch; and all evaluations
        are settled. An open transaction is not done: the audit waits for its end.
        """
        invariants, (task,) = self.invariants, self.config.prompts.mixture
        left = invariants.open
        if self.cluster.open_transactions():
            return False
        if self.hosts is not None and self.hosts.missing(max(invariants.manifests, default=None)):
            return False
        if any(parse_trajectory_id(name).purpose == "evaluation" for name in left):
            return False
        if invariants.final:
            return True
        drawn = invariants.prompts.get(PROMPTS.short_name, 0) == task.size
        in_buffer = len(left) < self.config.experience.global_batch and left <= invariants.scored
        return drawn and in_buffer and invariants.covered >= invariants.batches.keys()

    def _check_end(self) -> None:
        if not self._is_done():
            invariants = self.invariants
            left = sorted(invariants.open)
            newest = max(invariants.manifests, default=None)
            missing = [] if self.hosts is None else self.hosts.missing(newest)
            opened = self.cluster.open_transactions()
            raise InvariantViolated(
                f"{CALM_S:g} s after the last fault the run has not finished: {len(left)} trajectories are not settled "
                f"({', '.join(left[:6])}); of {len(invariants.batches)} batches {len(invariants.covered)} are trained"
                + (f"; version {newest} is not at {', '.join(missing)}" if missing else "")
                + (f"; transactions of {', '.join(opened)} are open" if opened else "")
            )
        self.invariants.check_end()
        audit = audit_cluster(self.cluster, self.config.run.name)
        if not audit.passed:
            raise InvariantViolated(f"the audit failed: {audit}")
        if audit.expired or audit.dispatched != self.invariants.assigned:  # trims change no count
            raise InvariantViolated(f"{self.invariants.assigned} trajectories were assigned; the audit: {audit}")
