"""The load of a run, folded from metrics, heartbeats and settled trajectories.

All ages are measured by this process's monotonic clock, from the receipt of a record: the clocks of the machines that
wrote the records do not matter.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from operators.autoscaler.observation import Observation
from operators.io.validation import MAX_STARTS_APART
from schemas.records import Metric, ReplicaStatus, Settled
from schemas.topics import PAUSE, PLACEMENT

TRAINER = "trainer"
"""The name of the trainer's metrics."""
SILENT_STEPS = 3.0
"""A trainer whose next metric takes this many times as long as its last step waits for a batch."""
WAITING_S = 45.0
"""Placement repeats how much work waits every 15 s while there is some; after this time nothing waits."""
MAX_SETTLED = 4096
"""Of the newest settled trajectories, at most, the staleness is kept."""


class Load:
    """The newest known load. A replica without a heartbeat for `timeout_s` seconds is gone; staleness is that of the
    trajectories settled in the last `window_s` seconds.

    A writer of metrics that dies inside a transaction hides the trainer's metrics until it ends. Meanwhile the trainer
    is not silent; after `timeout_s` seconds its share is unknown.
    """

    def __init__(self, timeout_s: float, window_s: float) -> None:
        self._timeout_s, self._window_s = timeout_s, window_s
        self._replicas: dict[int, tuple[ReplicaStatus, float]] = {}
        self._trainer: tuple[dict[str, float], float] | None = None
        self._settled: deque[tuple[float, int]] = deque(maxlen=MAX_SETTLED)
        self._paused = False
        self._waiting = 0, 0.0
        self._read_at: float | None = None
        """When no metric was hidden last."""

    def record_read(self, now: float) -> None:
        """Note that all metrics have been read at `now`: none is behind an open transaction."""
        self._read_at = now

    def record(self, record: Any, now: float) -> None:
        """Fold one record that was received at `now`, in monotonic seconds."""
        match record:
            case ReplicaStatus():
                self._record_heartbeat(record, now)
            case Settled(outcome="batched", staleness=int(staleness)):
                self._settled.append((now, staleness))
            case Metric(name=name) if name == TRAINER:
                if "trainer/idle_ratio" in record.values:
                    self._trainer = record.values, now
            case Metric(name=name) if name == PAUSE:
                self._paused = bool(record.values.get("paused"))
            case Metric(name=name) if name == PLACEMENT:
                self._waiting = int(record.values.get("waiting", 0)), now

    def observe(self, now: float, time_of_day: int, price: float | None) -> Observation:
        while self._settled and self._settled[0][0] <= now - self._window_s:
            self._settled.popleft()
        working = [
            status
            for status, at in self._replicas.values()
            if now - at <= self._timeout_s and status.policy_version is not None and status.state in _WORKING
        ]
        idle = sum(status.running + status.waiting == 0 for status in working)
        return Observation(
            at=now,
            running=len({status.process for status in working}),
            slots=sum(status.capacity for status in working),
            requests=sum(status.running + status.waiting for status in working),
            waiting=self._waiting[0] if now - self._waiting[1] <= WAITING_S else 0,
            rollout_idle=idle / len(working) if working else None,
            trainer_idle=self._trainer_idle(now),
            staleness=sum(each for _, each in self._settled) / len(self._settled) if self._settled else None,
            price=price,
            time_of_day=time_of_day,
            paused=self._paused,
        )

    def _record_heartbeat(self, status: ReplicaStatus, now: float) -> None:
        known, at = self._replicas.get(status.replica, (status, now))
        starts = status.incarnation - known.incarnation
        if 0 <= starts <= MAX_STARTS_APART or now - at > self._timeout_s:  # a silent one may have been a foreign record
            self._replicas[status.replica] = status, now

    def _trainer_idle(self, now: float) -> float | None:
        """The share of the last step; a trainer that is silent for much longer than that step has waited since."""
        if self._trainer is None:
            return None
        values, at = self._trainer
        read_at = at if self._read_at is None else max(at, self._read_at)
        if now - read_at > self._timeout_s:
            return None
        idle, waited, update = (values.get(name, 0.0) for name in ("trainer/idle_ratio", "time/wait", "time/update"))
        silent = read_at - at
        if silent > SILENT_STEPS * (waited + update):
            return max(idle, 1 - update / silent)
        return idle


_WORKING = ("running", "loading")
