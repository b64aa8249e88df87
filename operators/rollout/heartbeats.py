"""Heartbeats: a thread with a producer of its own, so that a replica that is stuck in a step is seen to be stuck."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

from infra.kafka.producer import BoundedProducer

from operators.rollout.replica import Replica
from schemas.codec import encode
from schemas.records import ReplicaStatus

_Seen = tuple[object, ...]


class Heartbeats:
    """Sends each replica's status every `period_s` seconds and at once when `changed` is called."""

    def __init__(
        self, producer: BoundedProducer, topic: str, process: int, replicas: Sequence[Replica], period_s: float
    ) -> None:
        self._producer, self._topic, self._process, self._replicas = producer, topic, process, replicas
        self._period_s = period_s
        self._wake = threading.Event()
        self._ended = threading.Event()
        self.step_seconds = 0.0
        self._thread = threading.Thread(target=self._beat, name="heartbeats", daemon=True)
        self._thread.start()

    def changed(self) -> None:
        """Send now: something that placement waits for has changed."""
        self._wake.set()

    def close(self) -> None:
        """Say that the replicas have stopped, and end."""
        self._ended.set()
        self._wake.set()
        self._thread.join(timeout=5)
        for replica in self._replicas:
            replica.state = "stopped"
        self._send()
        self._producer.close(timeout_s=2)

    def _beat(self) -> None:
        while not self._ended.is_set():
            self._wake.clear()
            self._send()
            self._wake.wait(self._period_s)

    def _send(self) -> None:
        for replica in self._replicas:
            status = describe(replica, self._process, self.step_seconds, lambda: time.time_ns() // 10**6)
            value, headers = encode(status)
            self._producer.send(self._topic, value, key=f"rollout-{replica.index}".encode(), headers=headers)


def describe(replica: Replica, process: int, step_seconds: float, now: Callable[[], int]) -> ReplicaStatus:
    """The heartbeat of `replica` right now."""
    load = replica.engine.status()
    return ReplicaStatus(
        replica=replica.index,
        process=process,
        incarnation=replica.incarnation,
        state=replica.state,
        policy_version=replica.engine.version,
        running=load.running,
        waiting=load.waiting,
        capacity=load.capacity,
        kv_used=load.kv_used,
        kv_capacity=load.kv_capacity,
        tokens_generated=load.tokens_generated,
        step_seconds=step_seconds,
        host=socket.gethostname(),
        pid=os.getpid(),
        sent_at=now(),
    )
