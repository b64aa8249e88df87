"""One history of a run: every role on a simulated cluster, with the faults of the history, under its invariants."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from random import Random

from infra.kafka.simulated_clients import SimulatedClients
from infra.kafka.simulated_consumer import CommitSignals
from infra.kafka.simulated_producer import EncodeForRelease, SimulatedRecord, as_it_is
from infra.kafka.topic_reader import schema_of
from infra.simulation.brokers import BROKERS, Led, Reach, SimulatedBrokers
from infra.simulation.cluster import Place, SimulatedCluster
from infra.simulation.data_network import LINK_FAULTS, LinkFault
from infra.simulation.network import OF_COORDINATORS, ONLY, REQUEST_FAULTS, Network, RequestFaults, SimulatedConnection
from infra.simulation.process import SimulatedProcess
from infra.simulation.scheduler import EventScheduler
from infra.simulation.streams import Streams
from pipelines.config import Config
from pipelines.shards import partitions_of
from pipelines.simulate.configurations import extended
from pipelines.simulate.faults import Fault
from pipelines.simulate.hosts import SimulatedHosts
from pipelines.simulate.invariants import Invariants, InvariantViolated, audit_cluster
from pipelines.simulate.observer import Committed, LogObserver, event_text
from pipelines.simulate.simulated_role import SimulatedRole, start_trim
from pipelines.simulate.transfers import Transfers
from pipelines.simulate.wiring import Wiring
from schemas.codec import Headers, as_version, encode, versions_of
from schemas.identity import parse_trajectory_id
from schemas.records import Drain, Pause
from schemas.topics import CATALOGUE, CONTROL, INBOX, PAUSE, PROMPTS


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

REACHED: Sequence[Reach] = ("all", "all", "isolated")
"""What the process of such a fault reaches of an isolated broker and the others; every other process reaches these."""
ONLY_SHARE = 1 / 3
"""Share of the faults of requests that only some kinds of requests have."""
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
        until: float = math.inf,
        step_s: float = math.inf,
        at_step: Callable[[SimulatedHistory], None] = lambda history: None,
    ) -> None:
        """`at_step` is called after each `step_s` seconds, with the events and the state so far."""
        self.config, self.history, self._until = config, history, until
        self._step_s, self._at_step = step_s, at_step
        self.scheduler = EventScheduler()
        self.cluster = SimulatedCluster(
            {topic.name(config.run.name): len(partitions_of(config, topic)) for topic in CATALOGUE.values()}
        )
        self.streams = Streams(history.seed)
        self.brokers = SimulatedBrokers(self.cluster, lambda: self.scheduler.now)
        self.network = Network(self.scheduler, self.streams, self.brokers)
        self._delay_markers(0.0, Random())
        self._signals = CommitSignals(self.cluster, self.scheduler)
        self.invariants = Invariants(config)
        upgraded = any(fault.kind == "upgrade_run" for fault in history.faults)
        self._release: EncodeForRelease = EarlierRelease(self.streams) if upgraded else as_it_is
        self._records = record_events
        self._requests = 0
        self._digest = hashlib.blake2b(digest_size=16)
        LogObserver(self.cluster, config.run.name, self._committed, self._digest_message)
        self.hosts = SimulatedHosts(relays, self.scheduler, self.streams) if relays else None
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
        for fault in history.faults:
            scheduler.at(fault.at, lambda fault=fault: self._inject(fault))  # type: ignore[misc]
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
            if self.hosts is not None:
                self.hosts.close()
        return history

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
        return SimulatedClients(self.cluster, SimulatedConnection(self.network, process), self._signals, self._release)

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

    def _inject(self, fault: Fault) -> None:
        self.event(fault.role, f"fault {fault.kind} for {fault.seconds:.1f} s")
        role, now = self.roles[fault.role], self.scheduler.now
        draws = self.streams.of("fault", str(fault.number))
        disturb = partial(RequestFaults, fault.role, now, now + fault.seconds, draws=draws)
        match fault.kind:
            case "kill":
                role.kill(min(fault.seconds, 3.0))
            case "pause":
                role.pause(fault.seconds)
            case "replace":
                role.replace(fault.seconds)
            case "requests":
                kinds = tuple(draws.sample(REQUEST_FAULTS, draws.randint(1, 3)))
                share, only = draws.choice((0.05, 0.2, 0.6)), self.streams.of("fault", str(fault.number), "only")
                by_request = only.choice(ONLY) if only.random() < ONLY_SHARE else {}
                share = 0.5 if by_request else share
                self.network.faults.append(disturb(kinds=kinds, share=share, by_request=by_request))
            case "cut":
                self.network.faults.append(disturb(kinds=("lost",), share=1.0))
            case "stop":
                role.stop()
            case "notice":
                role.give_notice(fault.seconds)
            case "move_coordinator":
                of_coordinators = disturb(kinds=(), share=1.0, by_request=dict.fromkeys(OF_COORDINATORS, "moved"))
                self.network.faults.append(of_coordinators)
            case "isolate_broker":
                self.brokers.isolate(draws.randrange(BROKERS), fault.seconds, {fault.role: draws.choice(REACHED)})
            case "markers":
                self._delay_markers(now + fault.seconds, draws)
            case "drain":
                self._drain(role)
            case "pause_run":
                self._pause_run(True)
                self.scheduler.after(fault.seconds, lambda: self._pause_run(False))
            case "slow":
                role.slow_until = now + fault.seconds
            case "links" | "restart_host" if self.hosts and (host := self.hosts.host_of(role.name)) is not None:
                if fault.kind == "links":
                    for kind in draws.sample(LINK_FAULTS, draws.randint(1, 2)):
                        self.event(role.name, f"the link of {host} is {kind}")
                        self.hosts.network.faults.append(LinkFault(host, now, now + fault.seconds, kind))
                else:
                    self._restart_host(self.hosts, host, fault.seconds)
            case "trim":
                process = SimulatedProcess(self.scheduler, "trim", self._trim_ended)
                start_trim(process, self.cluster, self.config.run.name, partial(self.event, "trim"))
                self.scheduler.after(fault.seconds, process.kill)
            case "upgrade_run" | "restart_run" | "extend_run":
                if fault.kind == "upgrade_run":
                    self._release = as_it_is
                if fault.kind == "extend_run" and not self._extend():
                    return
                for name, each in self.roles.items():
                    each.end()
                    share = 1.0 if each is role else self.streams.of(name, fault.kind.removesuffix("_run")).random()
                    each.start_in(fault.seconds * share)

    def _delay_markers(self, end: float, draws: Random) -> None:
        """Delay the markers of transactions until `end`; those to an isolated broker are delayed at any time."""
        most = draws.choice((0.05, 0.5, 4.0))

        def later(led: Led, write: Callable[[], None]) -> None:
            delay_s = self.brokers.marked_in(led)
            if self.scheduler.now < end:
                delay_s += most * draws.random() ** 2
            if delay_s:
                self.scheduler.after(delay_s, write)
            else:
                write()

        self.cluster.later = later

    def _extend(self) -> bool:
        """Give the run a later goal; False if it has none."""
        later = extended(self.history.shape)
        if later is not None:
            self.config, roles = later
            self.invariants.extend(self.config)
            for each in roles:
                self.roles[each.role.name].wiring = each
        return later is not None

    def _restart_host(self, hosts: SimulatedHosts, host: str, seconds: float) -> None:
        on_it = [each for name, each in self.roles.items() if hosts.host_of(name) == host]
        for each in on_it:
            each.end()
        hosts.lose_store(host)
        for each in on_it:
            each.start_in(min(seconds, 5.0))

    def _trim_ended(self, error: Exception | None) -> None:
        if error is not None:
            self.fail(f"the trim ended with {type(error).__name__}: {error}")

    def _pause_run(self, paused: bool) -> None:
        """As `laminar runs pause` and `unpause`. Of pauses that overlap, the first end counts."""
        self._requests += 1
        value, headers = encode(Pause(self._requests, paused, "a person", "", 0))
        self.cluster.send(
            Place(CONTROL.name(self.config.run.name), 0), [SimulatedRecord(PAUSE.encode(), value, tuple(headers), 0)]
        )

    def _drain(self, role: SimulatedRole) -> None:
        """Drain the first replica of a rollout process, which is restarted after a while: else none would be left."""
        start = role.start_number
        if not start or not self.invariants.placement_started:  # as `laminar replicas drain`, which then refuses
            return
        replica = self.config.rollout.hosted(role.wiring.role.index)[0]
        value, headers = encode(Drain(replica, start))
        message = SimulatedRecord(b"", value, tuple(headers), 0)
        self.cluster.send(Place(INBOX.name(self.config.run.name), replica), [message])
        self.scheduler.after(20.0, lambda: role.kill(1.0))
