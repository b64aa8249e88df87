"""A predicted replica: the real `Replica` over an engine that counts tokens, woken only when something happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from infra.simulation.scheduler import EventScheduler
from operators.rollout.emulated_backend import AnnouncedWeights
from operators.rollout.heartbeats import replica_status
from operators.rollout.pending_events import PendingEvents
from operators.rollout.replica import Replica, ReplicaEvent, ReplicaOrder
from pipelines.simulate.prediction.counted_engine import CountedEngine
from schemas.records import ReplicaStatus

STEP_S = 0.001
"""The shortest pause between two steps of a replica."""


class PredictedReplica:
    """One incarnation of a replica. It is woken by orders, weights and the end of requests.

    Its engine is over `engines`, one or two. `publish` gets its events, as rollouts collect them for a transaction.
    `beat` is called when a heartbeat is due at once.
    """

    def __init__(
        self,
        scheduler: EventScheduler,
        replica: Replica,
        engines: Sequence[CountedEngine],
        weights: AnnouncedWeights,
        publish: Callable[[list[ReplicaEvent]], None],
        beat: Callable[[PredictedReplica], None],
        linger_s: float,
    ) -> None:
        self.replica, self.weights, self.alive = replica, weights, True
        self._engines = engines
        self._scheduler, self._write, self._beat, self._linger_s = scheduler, publish, beat, linger_s
        self._pending = PendingEvents((replica,), linger_s, lambda: scheduler.now)
        self._wake_at = float("inf")
        self._changes = 0
        self.wake(STEP_S)

    def handle(self, orders: list[ReplicaOrder]) -> None:
        """Carry out orders for this incarnation."""
        if self.alive:
            for order in orders:
                self.publish(self.replica.carry_out(order))
            self._step()

    def announce(self, version: Any) -> None:
        """A version has arrived at this replica's machine."""
        self.weights.announce(version)
        self.replica.announce(version)
        self.wake(0.0)

    def publish(self, events: list[ReplicaEvent]) -> None:
        """Publish `events` now, after those that are collected; nothing once this incarnation has ended."""
        self._pending.add(events, urgent=True)
        self._publish_due()

    def status(self, run: str) -> ReplicaStatus:
        """The heartbeat, with the load of now."""
        replica, engine = self.replica, self.replica.engine
        for each in self._engines:
            each.advance()
        place = (replica.index, replica.index, replica.incarnation)
        return replica_status(*place, replica.state, engine.version, engine.status(), 0.0, run, replica.reserved)

    def wake(self, seconds: float) -> None:
        """Step in `seconds`, unless it steps earlier."""
        at = self._scheduler.now + seconds
        if at < self._wake_at:
            self._wake_at = at
            self._scheduler.at(at, lambda: self._step() if at == self._wake_at else None)

    def _step(self) -> None:
        if not self.alive:
            return
        self._wake_at = float("inf")
        events = self.replica.step()
        if events and not self._pending:
            self._scheduler.after(self._linger_s + STEP_S, self._publish_due)
        self._pending.add(events)
        if self.replica.changes != self._changes:
            self._changes = self.replica.changes
            self._beat(self)
        due = self.replica.engine.due()
        if due < float("inf"):
            self.wake(max(due, STEP_S))
        elif events:  # its last request has ended: it may load newer weights now
            self.wake(STEP_S)
        self._publish_due()

    def _publish_due(self) -> None:
        if self.alive and (due := self._pending.take_due()):
            self._write(due)
