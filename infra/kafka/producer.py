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
from infra.kafka.readiness import BrokerUnreachable, wait_for_brokers

DEFAULT_BYTES_IN_FLIGHT = 32 * 1024 * 1024
DEFAULT_BLOCK_S = 120.0
_END_S = 5.0
_MAX_REQUEST = 16 * 1024 * 1024


class DeliveryFailed(RuntimeError):
    """Records did not get into the log, or are not known to; `__cause__` is what the first of them met."""


class BoundedProducer:
    """Sends records with acks=all and idempotence: in order within a partition, none twice.

    At most `max_bytes_in_flight` bytes (keys, values, headers) are unacknowledged; who sends more waits, for at most
    `max_block_s` seconds. How long a record is tried is the client property `delivery.timeout.ms`. Any thread may send.
    An error is raised by whichever call comes next, so give each duty its own producer. Raises DeliveryFailed if no
    broker answers within `max_block_s`.
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
        self._bytes = 0
        self._failed = 0
        self._failure: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._renewing = threading.Lock()
        self._spent = False
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
        """Take a record, waiting while too many bytes are before it.

        Raises DeliveryFailed if an earlier record failed (this one was not taken), or the topic cannot be had;
        TimeoutError if it waited too long; ValueError if the record alone is over the bound, or the producer is closed.
        """
        headers = list(headers)
        size = len(value) + len(key or b"") + sum(len(name) + len(header) for name, header in headers)
        if size > self._max_bytes:
            raise ValueError(f"a record of {size} bytes is over the bound of {self._max_bytes} bytes in flight")
        with self._changed:
            room = self._changed.wait_for(
                lambda: self._failure or self._closed or self._bytes + size <= self._max_bytes, self._max_block_s
            )
            if self._closed:
                raise ValueError("the producer is closed")
            self._raise()
            if not room:
                raise TimeoutError(f"{self._bytes} bytes were not acknowledged within {self._max_block_s:g} s")
            self._bytes += size
        try:
            future = self._usable().send(topic, value, key=key, headers=headers, partition=partition)
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
            _end(self._producer)

    def __enter__(self) -> BoundedProducer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _usable(self) -> KafkaProducer:
        """The producer, a new one after a failure: kafka-python's sends nothing more once a batch of it expired."""
        with self._renewing:
            if self._spent:
                _end(self._producer)
                self._producer = _open(self._client, self._max_block_s)
                self._spent = False
            return self._producer

    def _settle(self, size: int, error: BaseException | None) -> None:
        with self._changed:
            self._bytes -= size
            if error is not None:
                self._failed += 1
                self._failure = self._failure or error
                self._spent = True
            self._changed.notify_all()

    def _raise(self) -> None:
        """Raise what failed since the last time, once."""
        if self._failure is None:
            return
        failure, self._failure = self._failure, None
        failed, self._failed = self._failed, 0
        raise DeliveryFailed(f"{failed} record(s) were not delivered: {failure!r}") from failure


def _open(client: ClientProperties, deadline_s: float) -> KafkaProducer:
    try:
        wait_for_brokers(client, deadline_s)  # kafka-python's producer leaks its sockets when it finds none
        return KafkaProducer(
            **client.producer(
                acks="all",
                enable_idempotence=True,
                linger_ms=0,
                metrics_enabled=False,
                max_request_size=_MAX_REQUEST,
                allow_auto_create_topics=False,
            )
        )
    except (BrokerUnreachable, KafkaError) as error:
        raise DeliveryFailed(f"no broker takes records: {error}") from error


def _end(producer: KafkaProducer) -> None:
    """End a producer and its thread; records that it still has fail."""
    producer._sender.force_close()  # its `close` alone waits for the brokers, and leaves the thread when it gives up
    producer.close(timeout=_END_S)
