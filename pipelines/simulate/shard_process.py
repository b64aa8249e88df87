"""A process of a simulated role: the real source, fold, maps and commits, in two fibers as in two threads.

One fiber polls and folds; the other commits what has been emitted, as the sink's thread does. A session that is lost
makes the source open another; every other error ends the process. A process that is asked to end commits its last
outputs first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

from infra.kafka.session import SessionLost, Sessions
from infra.kafka.simulated_clients import SimulatedClients
from infra.simulation.process import SimulatedProcess
from infra.simulation.scheduler import Signal
from operators.io.commits import ShardCommits
from operators.io.elements import Emission, Polled, Restored
from operators.io.fold_records import FoldRunner, idle_seconds_of
from operators.io.map_outputs import map_emission
from operators.io.source import ShardSource
from pipelines.simulate.steps import SimulatedNotice, SimulatedStep
from pipelines.simulate.transfers import Transfers
from pipelines.simulate.wiring import Wiring

MAX_EMISSIONS = 64
"""Emissions that may wait for a transaction, as in the sink."""


class ShardProcess:
    """One process of a role. `turn_s` is the time of one poll of a busy step."""

    def __init__(
        self,
        wiring: Wiring,
        process: SimulatedProcess,
        clients: SimulatedClients,
        turn_s: Callable[[], float],
        transfers: Transfers | None = None,
    ) -> None:
        self.wiring, self.process, self._turn_s = wiring, process, turn_s
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
            if not idle_s:
                self.process.sleep(self._turn_s())
        if (last := self._source.final_poll()) is not None and runner.fold is not None:
            self._emit(last)
        while self._waiting or self._committing:
            self.process.scheduler.wait([self._changed])

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
