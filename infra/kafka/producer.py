"""BoundedProducer: a plain producer (no transactions) with bounded memory that reports every error.

For records beside the pipeline: heartbeats, metrics, manifests. kafka-python's own producer accepts any amount of
records and buffers them until the brokers acknowledge; here the sender waits instead (invariant 7).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import cast

from kafka import KafkaProducer
from kafka.errors import KafkaError

from infra.closing import ClosedAtExit
from infra.kafka.client_patches import force_close
from infra.kafka.properties import ClientProperties
from infra.kafka.readiness import BrokerUnreachable, wait_for_brokers

DEFAULT_BYTES_IN_FLIGHT = 32 * 1024 * 1024
DEFAULT_BLOCK_S = 120.0
_END_S = 5.0
_MAX_REQUEST = 16 * 1024 * 1024


class DeliveryFailed(RuntimeError):
    """Records were not written, or possibly not; `__cause__` is the error of the first."""


class BoundedProducer(ClosedAtExit):
    """Sends records with acks=all and idempotence: in order within a partition, none twice.

    At most `max_bytes_in_flight` bytes (keys, values, headers) are unacknowledged; `send` waits for room, at most
    `max_block_s` seconds. The client property `delivery.timeout.ms` bounds the retries of a record. Thread-safe. The
    next call, from any thread, raises an error, so use one producer per purpose. Raises DeliveryFailed if no broker
    responds within `max_block_s`.
    """

    def __init__(
        self,
        client: ClientProperties,
        *,
        max_bytes_in_flight: int = DEFAULT_BYTES_IN_FLIGHT,
        max_block_s: float = DEFAULT_BLOCK_S,
    ) -> None:
        self._client = client
        self._max_block_s = max_block_s
        self._max_bytes = max_bytes_in_flight
        self.bytes_in_flight = 0
        """Bytes sent and not yet acknowledged."""
        self._failed = 0
        self._failure: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._renew_lock = threading.Lock()
        self._needs_new = False
        self._producer = _open(client, max_block_s)

    def send(
        self,
        topic: str,
        value: bytes,
        *,
        key: bytes | None = None,
        headers: Iterable[tuple[str, bytes]] = (),
        partition: int | None = None,
    ) -> None:
        """Send a record; wait while too many bytes are unacknowledged.

        Raises DeliveryFailed if an earlier record failed (this one was not sent) or the topic is not available;
        TimeoutError if it waited too long; ValueError if one record is over the bound, or the producer is closed.
        """
        headers = list(headers)
        size = len(value) + len(key or b"") + sum(len(name) + len(header) for name, header in headers)
        if size > self._max_bytes:
            raise ValueError(f"a record of {size} bytes is over the bound of {self._max_bytes} bytes in flight")
        with self._changed:
            room = self._changed.wait_for(
                lambda: self._failure or self._closed or self.bytes_in_flight + size <= self._max_bytes,
                self._max_block_s,
            )
            if self._closed:
                raise ValueError("the producer is closed")
            self._raise()
            if not room:
                raise TimeoutError(f"{self.bytes_in_flight} bytes were not acknowledged within {self._max_block_s:g} s")
            self.bytes_in_flight += size
        try:
            future = self._current().send(topic, value, key=key, headers=headers, partition=partition)
        except BaseException as error:
            self._settle(size, None)
            if isinstance(error, KafkaError):
                raise DeliveryFailed(f"a record for {topic} cannot be sent: {error!r}") from error
            raise
        future.add_callback(lambda _: self._settle(size, None))
        future.add_errback(lambda error: self._settle(size, error))

    def flush(self, timeout_s: float) -> None:
        """Wait until all records sent are in the log. Raises DeliveryFailed, TimeoutError after `timeout_s` seconds."""
        with self._changed:
            empty = self._changed.wait_for(lambda: self._failure or not self.bytes_in_flight, timeout_s)
            self._raise()
            if not empty:
                raise TimeoutError(f"{self.bytes_in_flight} bytes were not acknowledged within {timeout_s:g} s")

    def close(self, timeout_s: float = 10.0) -> None:
        """Flush, and close the connection in any case; unacknowledged records are dropped.

        Raises like `flush`. A second call does nothing.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        try:
            self.flush(timeout_s)
        finally:
            _end(self._producer)

    def _current(self) -> KafkaProducer:
        """The producer, a new one after a failure: kafka-python's sends nothing more after a batch has expired."""
        with self._renew_lock:
            if self._needs_new:
                _end(self._producer)
                self._producer = _open(self._client, self._max_block_s)
                self._needs_new = False
            return self._producer

    def _settle(self, size: int, error: BaseException | None) -> None:
        with self._changed:
            self.bytes_in_flight -= size
            if error is not None:
                self._failed += 1
                self._failure = self._failure or error
                self._needs_new = True
            self._changed.notify_all()

    def _raise(self) -> None:
        """Raise the failure since the last call, once."""
        if self._failure is None:
            return
        failure, self._failure = self._failure, None
        failed, self._failed = self._failed, 0
        raise DeliveryFailed(f"{failed} record(s) were not delivered: {failure!r}") from failure


def open_producer(client: ClientProperties) -> BoundedProducer:
    """A producer for `client`, which may be that of a log in memory."""
    return BoundedProducer(client) if client.clients is None else cast(BoundedProducer, client.clients.producer())


def _open(client: ClientProperties, deadline_s: float) -> KafkaProducer:
    try:
        wait_for_brokers(client, deadline_s)  # without a broker, kafka-python's producer leaks its sockets
        return KafkaProducer(
            **client.producer(
                acks="all",
                enable_idempotence=True,
                linger_ms=0,
                metrics_enabled=False,
                max_request_size=_MAX_REQUEST,
            )
        )
    except (BrokerUnreachable, KafkaError) as error:
        raise DeliveryFailed(f"no broker accepts records: {error}") from error


def _end(producer: KafkaProducer) -> None:
    """Close a producer and its thread; its pending records fail."""
    force_close(producer)
    producer.close(timeout=_END_S)
