"""A process of a simulated role: the real source, fold, maps and commits, in two fibers as in two threads.

One fiber polls and folds; the other commits what has been emitted, as the sink's thread does. A session that is lost
makes the source open another; every other error ends the process.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from infra.kafka.session import SessionLost, Sessions
from infra.kafka.simulated_clients import SimulatedClients
from infra.simulation.process import SimulatedProcess
from infra.simulation.scheduler import Signal
from operators.io.commits import ShardCommits
from operators.io.elements import Emission, Restored
from operators.io.fold_records import FoldRunner, idle_seconds_of
from operators.io.map_outputs import map_emission
from operators.io.source import ShardSource
from pipelines.simulate.steps import SimulatedStep
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
        self._runner = FoldRunner(SimulatedStep(wiring.step, process, clients, transfers), now=process.unix_ms)
        self._commits = ShardCommits(wiring.shard, self._sessions, process.monotonic)
        self._waiting: list[Emission] = []
        self._changed = Signal()
        process.start("source", self._poll)
        process.start("sink", self._commit)

    @property
    def start(self) -> int:
        """The number of the present start; 0 before the first."""
        session = self._sessions.get(self.wiring.shard.group)
        return 0 if session is None else session.start

    def _poll(self) -> None:
        runner, scheduler = self._runner, self.process.scheduler
        while True:
            fold = runner.fold
            idle_s = math.inf if fold is None else idle_seconds_of(fold)
            element = self._source.next(wait=idle_s)
            if isinstance(element, Restored):
                runner.close()
                runner.restore(element)
                continue
            emission = runner.apply(element)
            if emission is not None:
                for function in self.wiring.maps:
                    emission = map_emission(emission, function)
                while len(self._waiting) >= MAX_EMISSIONS:
                    scheduler.wait([self._changed])
                self._waiting.append(emission)
                scheduler.notify(self._changed)
            if not idle_s:
                self.process.sleep(self._turn_s())

    def _commit(self) -> None:
        scheduler = self.process.scheduler
        while True:
            while not self._waiting:
                scheduler.wait([self._changed])
            emissions, self._waiting = self._waiting, []
            scheduler.notify(self._changed)
            try:
                self._commits.commit(emissions)
            except SessionLost:
                continue  # the source opens a new session
