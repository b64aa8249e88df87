"""HeartbeatThread publishes the state of a process at a fixed period, in its own thread with a plain producer.

A heartbeat must not be part of a transaction: a process that dies inside one hides the records of all other processes
in the same partition until the transaction ends. Nor may a heartbeat wait for the step of the process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from infra.kafka.producer import BoundedProducer, DeliveryFailed
from schemas.codec import encode

log = logging.getLogger(__name__)


class Heartbeat(NamedTuple):
    """A record to publish: the full topic name, its key, and an instance of a record class."""

    topic: str
    key: str
    record: Any


class HeartbeatThread:
    """Publishes `heartbeats()` at once and every `period_s` seconds through `producer`, which it closes at the end.

    A heartbeat that Kafka does not accept is not retried: the next one is newer.
    """

    def __init__(
        self, name: str, producer: BoundedProducer, heartbeats: Callable[[], Iterable[Heartbeat]], period_s: float
    ) -> None:
        self._producer, self._heartbeats, self._period_s = producer, heartbeats, period_s
        self._failing = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and close the producer."""
        self._ended.set()
        self._thread.join(timeout=5)
        try:
            self._producer.close(timeout_s=2)
        except (DeliveryFailed, TimeoutError) as error:
            log.warning("the last heartbeat was not delivered: %s", error)

    def _run(self) -> None:
        while not self._ended.is_set():
            self._send()
            self._ended.wait(self._period_s)

    def _send(self) -> None:
        try:
            for topic, key, record in self._heartbeats():
                value, headers = encode(record)
                self._producer.send(topic, value, key=key.encode(), headers=headers)
            self._failing = False
        except (DeliveryFailed, TimeoutError) as error:
            if not self._failing:
                log.warning("heartbeats are not delivered: %s", error)
            self._failing = True
        except ValueError:
            if not self._ended.is_set():  # otherwise the producer was closed during the wait for a broker
                raise
