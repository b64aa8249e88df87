"""The heartbeats of a simulated rollout process: the real statuses, from a fiber of that process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from infra.kafka.producer import DeliveryFailed
from infra.simulation.process import SimulatedProcess
from infra.simulation.scheduler import Signal
from operators.rollout.engine import EngineStatus
from operators.rollout.heartbeats import replica_status
from operators.rollout.replica import Replica
from schemas.codec import encode
from schemas.records import ReplicaStatus
from schemas.topics import REPLICAS

_NO_LOAD = EngineStatus(0, 0, 0, 0, 0, 0)


class SimulatedHeartbeats:
    """Publishes the status of the replicas `hosted` every `period_s` seconds, and at once after `send_now`."""

    def __init__(
        self,
        host: SimulatedProcess,
        producer: Any,
        run: str,
        process: int,
        hosted: Sequence[int],
        incarnation: int,
        period_s: float,
    ) -> None:
        self._host, self._producer, self._run, self._process = host, producer, run, process
        self._hosted, self._incarnation, self._period_s = hosted, incarnation, period_s
        self._replicas: Sequence[Replica] = ()
        self._closed, self._wake = False, Signal()
        host.start(f"heartbeats {incarnation}", self._beat, vital=False)

    def set_replicas(self, replicas: Sequence[Replica]) -> None:
        """Report the status of `replicas` from now on."""
        self._replicas = replicas
        self.send_now()

    def send_now(self) -> None:
        """Publish now."""
        self._host.scheduler.notify(self._wake)

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step of the replicas, which takes no time here."""
        yield

    def close(self) -> None:
        """End after the present heartbeat. Placement learns of the end from the next start, or from a time-out."""
        self._closed = True
        self.send_now()

    def _beat(self) -> None:
        while not self._closed:
            for status in self._statuses():
                value, headers = encode(status)
                try:
                    self._producer.send(
                        REPLICAS.name(self._run), value, key=f"rollout-{status.replica}".encode(), headers=headers
                    )
                except DeliveryFailed:
                    break  # the next one has newer data
            self._host.scheduler.wait([self._wake], self._period_s)

    def _statuses(self) -> list[ReplicaStatus]:
        if self._replicas:
            found = [
                replica_status(
                    each.index,
                    self._process,
                    each.incarnation,
                    each.state,
                    each.engine.version,
                    each.engine.status(),
                    0.0,
                    self._run,
                    each.reserved,
                )
                for each in self._replicas
            ]
        else:
            found = [
                replica_status(index, self._process, self._incarnation, "starting", None, _NO_LOAD, 0.0, self._run)
                for index in self._hosted
            ]
        return [replace(each, host=self._host.name, pid=1, sent_at=self._host.unix_ms()) for each in found]
