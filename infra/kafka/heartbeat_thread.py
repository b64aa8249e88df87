"""HeartbeatThread publishes the state of a process at a fixed period, in its own thread with a plain producer.

A heartbeat must not be part of a transaction: a process that dies inside one hides the records of all other processes
in the same partition until the transaction ends. Nor may a heartbeat wait for the step of the process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from infra.kafka.producer import BoundedProducer, DeliveryFailed
from infra.system import SYSTEM, System
from schemas.codec import encode, is_read

log = logging.getLogger(__name__)


class Heartbeat(NamedTuple):
    """A record to publish: the full topic name, its key, and an instance of a record class."""

    topic: str
    key: str
    record: Any


class HeartbeatThread:
    """Publishes `heartbeats()` through `producer`: at once, every `period_s` seconds, and when `send_now` is called.

    `check` is called after each time. `close` closes the producer.

    A heartbeat that Kafka does not accept is not retried: the next one is newer.
    """

    def __init__(
        self,
        name: str,
        producer: BoundedProducer,
        heartbeats: Callable[[], Iterable[Heartbeat]],
        period_s: float,
        check: Callable[[], None] = lambda: None,
        system: System = SYSTEM,
    ) -> None:
        self._producer, self._heartbeats, self._period_s, self._check = producer, heartbeats, period_s, check
        self._failing = False
        self._wake, self._stopped = system.event(), False
        self._thread = system.start_thread(name, self._beat, vital=True)

    def send_now(self) -> None:
        """Publish now, because something has changed for which others wait."""
        self._wake.set()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()
        self._thread.join(timeout=5)

    def close(self) -> None:
        """Stop the thread and close the producer."""
        self.stop()
        try:
            self._producer.close(timeout_s=2)
        except (DeliveryFailed, TimeoutError) as error:
            log.warning("the last heartbeat was not delivered: %s", error)

    def _beat(self) -> None:
        while True:
            self._wake.clear()
            if self._stopped:
                return
            self._send()
            self._check()
            self._wake.wait(self._period_s)

    def _send(self) -> None:
        try:
            for topic, key, record in self._heartbeats():
                if not is_read(type(record)):
                    continue  # roles of an older release would reject it, and nothing waits for it
                value, headers = encode(record)
                self._producer.send(topic, value, key=key.encode(), headers=headers)
            self._failing = False
        except (DeliveryFailed, TimeoutError) as error:
            if not self._failing:
                log.warning("heartbeats are not delivered: %s", error)
            self._failing = True
        except ValueError:
            if not self._stopped:  # otherwise the producer was closed during the wait for a broker
                raise
