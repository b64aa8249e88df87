"""One process of a simulated run and its supervisor: it starts, dies, pauses, and comes back after its successor."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from infra.kafka.properties import ClientProperties
from infra.kafka.session import SessionLost
from infra.kafka.sessions import Sessions
from infra.kafka.simulated_clients import SimulatedClients
from infra.kafka.simulated_inspection import InspectionClients
from infra.simulation.cluster import SimulatedCluster
from infra.simulation.process import SimulatedProcess
from infra.simulation.scheduler import Signal
from operators.io.commits import ShardCommits
from operators.io.elements import Emission, Polled, Restored
from operators.io.fold_records import FoldRunner, idle_seconds_of
from operators.io.map_outputs import map_emission
from operators.io.source import ShardSource
from operators.trainer.rank_lost import RankLost
from pipelines.config import Config
from pipelines.layouts import layouts
from pipelines.simulate.steps import SimulatedNotice, SimulatedStep
from pipelines.simulate.transfers import Transfers
from pipelines.simulate.wiring import Wiring
from pipelines.trim.plan import TrimRefused, execute, plan_trim

MAX_EMISSIONS = 64
"""Emissions that may wait for a transaction, as in the sink."""


class ShardProcess:
    """One process of a role: the real source, fold, maps and commits, in two fibers as in two threads.

    One fiber polls and folds; the other commits what has been emitted, as the sink's thread does. A session that is
    lost makes the source open another; every other error ends the process. A process that is asked to end commits its
    last outputs first. `pause_s` is the pause after a poll, of a busy step or of one that waits for records.
    """

    def __init__(
        self,
        wiring: Wiring,
        process: SimulatedProcess,
        clients: SimulatedClients,
        pause_s: Callable[[bool], float],
        transfers: Transfers | None = None,
    ) -> None:
        self.wiring, self.process, self._pause_s = wiring, process, pause_s
        self._sessions = Sessions(lambda config: clients)
        self._source = ShardSource(
            wiring.shard,
            wall_ms=process.unix_ms,
            clock=process.monotonic,
            sessions=self._sessions,
            wait=process.wait,
        )
        self.notice = SimulatedNotice(process)
        step = SimulatedStep(wiring.step, process, clients, transfers, self.notice)
        self._runner = FoldRunner(step, now=process.unix_ms)
        self._commits = ShardCommits(wiring.shard, self._sessions, process.monotonic)
        self._waiting: list[Emission] = []
        self._committing = False
        self._changed = Signal()
        process.start("source", self._poll)
        process.start("sink", self._commit)

    @property
    def start(self) -> int:
        """The number of the present start; 0 before the first."""
        session = self._sessions.get(self.wiring.shard.group)
        return 0 if session is None else session.start

    def _poll(self) -> None:
        runner = self._runner
        while not self.process.stopping:
            fold = runner.fold
            idle_s = math.inf if fold is None else idle_seconds_of(fold)
            element = self._source.next(wait=idle_s)
            if isinstance(element, Restored):
                runner.close()
                runner.restore(element)
                continue
            self._emit(element)
            if pause_s := self._pause_s(not idle_s):
                self.process.sleep(pause_s)
        if (last := self._source.final_poll()) is not None and runner.fold is not None:
            self._emit(last)
        while self._waiting or self._committing:
            self.process.scheduler.wait([self._changed])
        runner.close()

    def _emit(self, polled: Polled) -> None:
        emission, scheduler = self._runner.apply(polled), self.process.scheduler
        if emission is None:
            return
        for function in self.wiring.maps:
            emission = map_emission(emission, function)
        while len(self._waiting) >= MAX_EMISSIONS:
            scheduler.wait([self._changed])
        self._waiting.append(emission)
        scheduler.notify(self._changed)

    def _commit(self) -> None:
        scheduler = self.process.scheduler
        while True:
            while not self._waiting:
                scheduler.wait([self._changed])
            emissions, self._waiting, self._committing = self._waiting, [], True
            scheduler.notify(self._changed)
            with suppress(SessionLost):  # the source opens a new session
                self._commits.commit(emissions)
            self._committing = False
            scheduler.notify(self._changed)


if TYPE_CHECKING:
    from pipelines.simulate.world import World


class SimulatedRole:
    """One process of a run and its supervisor, which starts it again when it ends."""

    def __init__(self, world: World, wiring: Wiring) -> None:
        self._world, self.wiring = world, wiring
        self.name = wiring.role.name
        self.slow_until = 0.0
        self._process: SimulatedProcess | None = None
        self._shard: ShardProcess | None = None
        self.processes: list[SimulatedProcess] = []
        """The present process, and earlier ones that are paused."""
        self.skew_s = world.skew_s((None if world.hosts is None else world.hosts.host_of(self.name)) or self.name)
        """By how much the clock of its host is wrong."""

    @property
    def start_number(self) -> int:
        """The present start number; 0 before the first."""
        return 0 if self._shard is None else self._shard.start

    def start(self) -> None:
        """Start a process."""
        world = self._world
        world.event(self.name, "starts")
        process: SimulatedProcess

        def ended(error: Exception | None) -> None:
            self._ended(process, error)

        skew_s = self.skew_s + world.streams.of(self.name, "clock").uniform(-2, 2)
        process = SimulatedProcess(world.scheduler, self.name, ended, skew_s)
        self._process = process
        self.processes = [*(each for each in self.processes if each.alive), process]
        if world.hosts is not None:
            process.end = partial(world.hosts.end_process, process)
        wiring = self.wiring if world.hosts is None else world.hosts.place(self.wiring)
        self._shard = ShardProcess(wiring, process, world.connect(process), self._pause_s, world.transfers)

    def kill(self, seconds: float) -> None:
        """Kill the process; start another after `seconds`."""
        process = self._process
        if process is None or not process.alive:
            return
        process.kill()
        self._restart(process, seconds)

    def end(self) -> None:
        """End all its processes, paused ones too."""
        for process in self.processes:
            process.kill()

    def retire(self) -> None:
        """End all its processes, and start none until `start`."""
        self.end()
        self._process = None

    def start_in(self, seconds: float) -> None:
        """Start a process in `seconds`, after `end`."""
        if self._process is not None:
            self._restart(self._process, seconds)

    def stop(self) -> None:
        """Ask the process to end; another starts then."""
        if self._process is not None:
            self._process.stopping = True

    def give_notice(self, seconds: float) -> None:
        """Tell the process that it will be killed in `seconds`: it hands its work over."""
        process, shard = self._process, self._shard
        if process is None or shard is None or not process.alive:
            return
        shard.notice.give()

        def kill() -> None:
            if self._process is process:
                self.kill(1.0)

        self._world.scheduler.after(seconds, kill)

    def pause(self, seconds: float) -> None:
        """Pause the process."""
        if self._process is not None:
            self._process.pause(seconds)

    def replace(self, seconds: float) -> None:
        """Pause the process, and start another at once. The first comes back as a zombie."""
        if self._process is not None and self._process.alive:
            self._process.pause(seconds)
            self.start()

    def _pause_s(self, busy: bool) -> float:
        if self._world.scheduler.now < self.slow_until:
            return 2.0
        return 0.4 if busy else 0.0

    def _ended(self, process: SimulatedProcess, error: Exception | None) -> None:
        world = self._world
        world.event(self.name, f"ends: {error!r}")
        if error is not None and not isinstance(error, SessionLost | RankLost):
            world.fail(f"{self.name} ended with {type(error).__name__}: {error}")
            return
        self._restart(process, 1.0)

    def _restart(self, process: SimulatedProcess, seconds: float) -> None:
        def start() -> None:
            if self._process is process:  # else a successor was started before
                self.start()

        self._world.scheduler.after(seconds, start)


REQUEST_S = 0.004
"""Seconds from a request to its response."""


def start_resharding(process: SimulatedProcess, config: Config, role: str, clients: SimulatedClients) -> None:
    """Give `role` the shards of `config` in `process`, as `laminar runs resume` does."""
    layout = layouts(config)[role]

    def change() -> None:
        while True:
            try:
                layout.apply(clients)
                return
            except SessionLost:
                process.sleep(0.5)

    process.start("reshard", change)


def start_trim(process: SimulatedProcess, cluster: SimulatedCluster, run: str, event: Callable[[str], None]) -> None:
    """Trim the log of `run` in `process`, which may be killed meanwhile; `event` is called with the result."""
    clients = InspectionClients(cluster, process.sleep, process.unix_ms, REQUEST_S)
    client = ClientProperties.of_clients(clients)

    def trim() -> None:
        try:
            plan = plan_trim(client, run, {}, now=process.unix_ms)
            event(f"trims the log to version {plan.trim_point.version}")
            execute(client, plan, Path())
            event(f"{sum(plan.trim_point.record_counts)} records are deleted")
        except TrimRefused as refused:
            event(f"the trim is refused: {refused}")

    process.start("trim", trim)
