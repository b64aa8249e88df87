"""BoundedProducer: a plain producer (no transactions) whose memory is bounded and whose errors are never lost.

For what a process says beside its pipeline: heartbeats, metrics, manifests. kafka-python's own producer takes whatever
it is given and holds it until the brokers do; here the sender waits instead (invariant 7).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import TracebackType

from kafka import KafkaProducer
from kafka.errors import KafkaError

from infra.kafka.properties import ClientProperties

DEFAULT_BYTES_IN_FLIGHT = 32 * 1024 * 1024
_MAX_REQUEST = 16 * 1024 * 1024


class DeliveryFailed(RuntimeError):
    """Records did not get into the log, or are not known to; `__cause__` is what the first of them met."""


class BoundedProducer:
    """Sends records with acks=all and idempotence: in order within a partition, none twice.

    At most `max_bytes_in_flight` bytes (keys, values, headers) are unacknowledged. How long a record is tried is the
    client property `delivery.timeout.ms`. Any thread may send. An error is raised by whichever call comes next, so
    give each duty its own producer. Raises DeliveryFailed if no broker answers.
    """

    def __init__(self, client: ClientProperties, *, max_bytes_in_flight: int = DEFAULT_BYTES_IN_FLIGHT) -> None:
        self._max_bytes = max_bytes_in_flight
        self._bytes = 0
        self._failed = 0
        self._failure: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        try:
            self._producer = KafkaProducer(
                **client.producer(
                    acks="all",
                    enable_idempotence=True,
                    linger_ms=0,
                    metrics_enabled=False,
                    max_request_size=_MAX_REQUEST,
                    allow_auto_create_topics=False,
                )
            )
        except KafkaError as error:
            raise DeliveryFailed(f"no broker answers at {client.bootstrap_servers}: {error!r}") from error

    def send(
        self,
        topic: str,
        value: bytes,
        *,
        key: bytes | None = None,
        headers: Iterable[tuple[str, bytes]] = (),
        partition: int | None = None,
    ) -> None:
        """Take a record, waiting while too many bytes are before it.

        Raises DeliveryFailed if an earlier record failed (this one was not taken), or the topic cannot be had;
        ValueError if the record alone is over the bound, or the producer is closed.
        """
        headers = list(headers)
        size = len(value) + len(key or b"") + sum(len(name) + len(header) for name, header in headers)
        if size > self._max_bytes:
            raise ValueError(f"a record of {size} bytes is over the bound of {self._max_bytes} bytes in flight")
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._closed or self._bytes + size <= self._max_bytes)
            self._raise()
            if self._closed:
                raise ValueError("the producer is closed")
            self._bytes += size
        try:
            future = self._producer.send(topic, value, key=key, headers=headers, partition=partition)
        except BaseException as error:
            self._settle(size, None)
            if isinstance(error, KafkaError):
                raise DeliveryFailed(f"a record for {topic} cannot be sent: {error!r}") from error
            raise
        future.add_callback(lambda _: self._settle(size, None))
        future.add_errback(lambda error: self._settle(size, error))

    @property
    def bytes_in_flight(self) -> int:
        """Bytes taken and not yet acknowledged."""
        return self._bytes

    def flush(self, timeout_s: float) -> None:
        """Return once everything taken is in the log. Raises DeliveryFailed, TimeoutError after `timeout_s` seconds."""
        with self._changed:
            empty = self._changed.wait_for(lambda: self._failure or not self._bytes, timeout_s)
            self._raise()
            if not empty:
                raise TimeoutError(f"{self._bytes} bytes were not acknowledged within {timeout_s:g} s")

    def close(self, timeout_s: float = 10.0) -> None:
        """Flush, and end the connection in any case; what is unacknowledged then is given up.

        Raises as `flush`; a second call does nothing.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        try:
            self.flush(timeout_s)
        finally:
            # `close` alone would wait for the brokers, and on a time-out leave its thread behind.
            if self._bytes:
                self._producer._sender.force_close()
            self._producer.close(timeout=max(timeout_s, 1.0))

    def __enter__(self) -> BoundedProducer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _settle(self, size: int, error: BaseException | None) -> None:
        with self._changed:
            self._bytes -= size
            if error is not None:
                self._failed += 1
                self._failure = self._failure or error
            self._changed.notify_all()

    def _raise(self) -> None:
        """Raise what failed since the last time, once."""
        if self._failure is None:
            return
        failure, self._failure = self._failure, None
        failed, self._failed = self._failed, 0
        raise DeliveryFailed(f"{failed} record(s) were not delivered: {failure!r}") from failure
