"""Watching one run: an observer's records are folded into a state, written to metrics.jsonl and shown."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from infra.clocks import wall_ms
from infra.kafka.unreadable_record import UnreadableRecord
from pipelines.inspect.metrics_file import (
    LAG,
    POSITION,
    UNREADABLE,
    Sink,
    by_topic,
    phase_metric,
    replica_metric,
    version_metric,
)
from pipelines.inspect.run_state.events import (
    CheckStarted,
    LagMeasured,
    PhaseStarted,
    RolesChanged,
    RoleState,
    RunEvent,
    Tick,
)
from pipelines.inspect.run_state.state import RunState, fold_all
from pipelines.present.view.live import LiveView
from schemas.records import Metric, ReplicaStatus, WeightVersion

if TYPE_CHECKING:
    from infra.kafka.observer import Observer

REPLICA_EVERY_MS = 2_000
LAG_EVERY_MS = 2_000
_POLL_S = 0.01
POSITION_EVERY_MS = 5_000
"""After a kill, the next observer rereads at most the records of this interval."""


def _trained_again(state: RunState, events: Iterable[RunEvent]) -> int | None:
    """The first step that a restarted trainer makes again; None if `events` have none."""
    newest = state.last_metric_at.get("trainer", 0)  # an observer may read a record twice
    steps = (each for each in events if isinstance(each, Metric) and each.name == "trainer")
    return next((each.step for each in steps if each.step <= state.step and each.measured_at > newest), None)


class Watch:
    """Keeps the newest `state` of a run. `tick` is cheap and never blocks; call it a few times per second.

    `source` may be set later, when Kafka is up. `file` and `view` are optional.
    """

    def __init__(
        self,
        state: RunState,
        *,
        source: Observer | None = None,
        file: Sink | None = None,
        view: LiveView | None = None,
        now: Callable[[], int] = wall_ms,
    ) -> None:
        self.state, self.source = state, source
        self._file, self._view, self._now = file, view, now
        self._written: dict[int, int] = {}
        self._lag_at = self._position_at = 0
        self._noted_topics: set[str] = set()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def start_phase(self, phase: str) -> RunState:
        """Record that the run enters `phase`."""
        now = self._now()
        return self._apply([PhaseStarted(phase, now)], [phase_metric(phase, len(self.state.phases), now)])

    def start_check(self, check: CheckStarted) -> RunState:
        """Record which check runs."""
        return self._apply([check], [])

    def add(self, metric: Metric) -> RunState:
        """Add a metric that is not published to a topic."""
        return self._apply([metric], [metric])

    def tick(self, roles: Mapping[str, RoleState] | None = None) -> RunState:
        """Read new records, add `roles`, and show the new state."""
        now = self._now()
        events: list[RunEvent] = [Tick(now)] if roles is None else [Tick(now), RolesChanged(roles)]
        metrics: list[Metric] = []
        if self.source is not None:
            unreadable = []
            for record in self.source.poll():
                if isinstance(record, UnreadableRecord):
                    unreadable.append(record)
                    continue
                events.append(record)
                if isinstance(record, Metric):
                    metrics.append(record)
                elif isinstance(record, WeightVersion):
                    metrics.append(version_metric(record))
                elif isinstance(record, ReplicaStatus) and self._is_due(record):
                    metrics.append(replica_metric(record))
            if unreadable:
                self._note_unreadable(unreadable)
                metrics.append(by_topic(UNREADABLE, Counter(record.short_name for record in unreadable), now))
            if not 0 <= now - self._lag_at < LAG_EVERY_MS:  # negative: the clock was set back
                self._lag_at = now
                lag = LagMeasured(self.source.lag(), self.source.inbox_lag)
                events.append(lag)
                if lag.behind:
                    metrics.append(by_topic(LAG, lag.behind, now))
            if metrics and self._file is not None and not 0 <= now - self._position_at < POSITION_EVERY_MS:
                self._position_at = now
                metrics.append(by_topic(POSITION, self.source.positions(), now))
        return self._apply(events, metrics)

    def read_to_end(self, timeout_s: float) -> RunState:
        """Read all that has been written until now, such as last heartbeats, for `timeout_s` seconds at most."""
        deadline = time.monotonic() + timeout_s
        if self.source is not None:
            self.source.expect_all()
            while not self.source.caught_up() and time.monotonic() < deadline:
                self.tick()
                time.sleep(_POLL_S)
        return self.state

    def _apply(self, events: Iterable[RunEvent], metrics: Iterable[Metric]) -> RunState:
        events = list(events)
        if self._view is not None and (again := _trained_again(self.state, events)) is not None:
            self._view.note(
                f"the trainer continues from its newest checkpoint: it trains the recorded batches of steps {again} to "
                f"{self.state.step} again"
            )
        self.state = fold_all(self.state, events)
        if self._file is not None:
            self._file.append(metrics)
        if self._view is not None:
            self._view.update(self.state)
        return self.state

    def _note_unreadable(self, unreadable: Iterable[UnreadableRecord]) -> None:
        """Show the first unreadable record of each topic; metrics.jsonl counts all of them."""
        for record in unreadable:
            if self._view is not None and record.short_name not in self._noted_topics:
                position = f"{record.short_name}, partition {record.partition}, offset {record.offset}"
                self._view.note(f"{position}: unreadable record: {record.reason}")
            self._noted_topics.add(record.short_name)

    def _is_due(self, status: ReplicaStatus) -> bool:
        since = status.sent_at - self._written.get(status.replica, -REPLICA_EVERY_MS)
        if 0 <= since < REPLICA_EVERY_MS and status.state != "stopped":  # negative: the clock was set back
            return False
        self._written[status.replica] = status.sent_at
        return True
