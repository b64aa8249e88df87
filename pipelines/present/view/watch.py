"""Watching one run: what an observer hears is folded, written to metrics.jsonl and shown."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Protocol

from infra.kafka.unreadable import Unreadable
from pipelines.inspect.metrics_file import (
    Sink,
    lag_metric,
    phase_metric,
    position_metric,
    replica_metric,
    unreadable_metric,
    version_metric,
)
from pipelines.inspect.run_state.events import Event, LagMeasured, PhaseStarted, RolesChanged, RoleState, Tick
from pipelines.inspect.run_state.state import RunState, fold_all
from pipelines.present.view.live import LiveView
from schemas.records import Metric, RelayStatus, ReplicaStatus, WeightVersion

REPLICA_EVERY_MS = 2_000
LAG_EVERY_MS = 2_000
POSITION_EVERY_MS = 5_000
"""An observer that takes over from one that was killed reads so much again."""


class EventSource(Protocol):
    """Where news of a run come from: `infra.kafka.observe.Observer`."""

    def poll(self) -> Iterable[Metric | WeightVersion | ReplicaStatus | RelayStatus | Unreadable]: ...

    def lag(self) -> Mapping[str, int]: ...

    def positions(self) -> Mapping[str, float]: ...

    def caught_up(self) -> bool: ...


class Watch:
    """Holds the newest snapshot, `state`. `tick` costs little and never waits; call it a few times a second.

    Before Kafka is up there is no `source`; it may be set later. `file` and `view` may be left out.
    """

    def __init__(
        self,
        state: RunState,
        *,
        source: EventSource | None = None,
        file: Sink | None = None,
        view: LiveView | None = None,
        now: Callable[[], int] = lambda: time.time_ns() // 10**6,
    ) -> None:
        self.state, self.source = state, source
        self._file, self._view, self._now = file, view, now
        self._written: dict[int, int] = {}
        self._lag_at = self._position_at = 0
        self._told_of: set[str] = set()

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def start_phase(self, phase: str) -> RunState:
        """The run goes over to `phase`."""
        now = self._now()
        return self._take([PhaseStarted(phase, now)], [phase_metric(phase, len(self.state.phases), now)])

    def add(self, metric: Metric) -> RunState:
        """Take in a metric that comes on no topic."""
        return self._take([metric], [metric])

    def tick(self, roles: Mapping[str, RoleState] | None = None) -> RunState:
        """Take in what is new, `roles` too, and show it."""
        now = self._now()
        events: list[Event] = [Tick(now)] if roles is None else [Tick(now), RolesChanged(roles)]
        kept: list[Metric] = []
        if self.source is not None:
            unreadable = []
            for record in self.source.poll():
                if isinstance(record, Unreadable):
                    unreadable.append(record)
                    continue
                events.append(record)
                if isinstance(record, Metric):
                    kept.append(record)
                elif isinstance(record, WeightVersion):
                    kept.append(version_metric(record))
                elif isinstance(record, ReplicaStatus) and self._is_due(record):
                    kept.append(replica_metric(record))
            if unreadable:
                self._tell_of(unreadable)
                kept.append(unreadable_metric(Counter(record.short_name for record in unreadable), now))
            if now - self._lag_at >= LAG_EVERY_MS:
                self._lag_at = now
                lag = LagMeasured(self.source.lag())
                events.append(lag)
                if lag.behind:
                    kept.append(lag_metric(lag.behind, now))
            if kept and self._file is not None and now - self._position_at >= POSITION_EVERY_MS:
                self._position_at = now
                kept.append(position_metric(self.source.positions(), now))
        return self._take(events, kept)

    def _take(self, events: Iterable[Event], kept: Iterable[Metric]) -> RunState:
        self.state = fold_all(self.state, events)
        if self._file is not None:
            self._file.append(kept)
        if self._view is not None:
            self._view.update(self.state)
        return self.state

    def _tell_of(self, unreadable: Iterable[Unreadable]) -> None:
        """Name the first of each topic; metrics.jsonl counts them all."""
        for record in unreadable:
            if self._view is not None and record.short_name not in self._told_of:
                where = f"{record.short_name}, partition {record.partition}, offset {record.offset}"
                self._view.note(f"{where}: a record that cannot be read: {record.reason}")
            self._told_of.add(record.short_name)

    def _is_due(self, status: ReplicaStatus) -> bool:
        since = status.sent_at - self._written.get(status.replica, -REPLICA_EVERY_MS)
        if 0 <= since < REPLICA_EVERY_MS and status.state != "stopped":  # below 0: the clock was set back
            return False
        self._written[status.replica] = status.sent_at
        return True
