"""What Laminar uses of kafka-python beyond its public names; patches of its connections, applied to the whole process:

- It reads sockets in pieces of 4 KB and releases the interpreter lock for each: 270 times for a fetch of 1 MB. Beside a
  computing thread each may take 5 ms to reacquire it, so that reading does not overlap with computation.
- It never closes a socket whose connection failed, or that has unsent data when its client is closed. The socket is
  garbage-collected later, with a ResourceWarning in unrelated code.
- It closes the connections of a client on the calling thread, while the client's own thread may be reading from one:
  its task then ends with an error in the log.
- It leaves a thread and its sockets behind for each consumer and administrative client that reaches no broker.
- It formats a socket twice for each wait (in an exception of its selector): four system calls, for each of which Python
  releases the interpreter lock.
- It waits without limit for the response to a TLS handshake, and does not close the socket of a failed handshake.
- It makes the class of each version of a response on first use, and its table of responses then has a weak reference to
  that class. Two threads may make the same class at once, and keep the one to which the table does not refer. No client
  of the process can read such a response any more (ReferenceError), and all connections hang until they time out.
- It makes the decoder of a version on first use, too, and changes a field of the response's description
  meanwhile. A second thread that changes it back may leave the first with a decoder that always fails (TypeError).
"""

from __future__ import annotations

import contextlib
import functools
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

READ_BYTES = 1 << 20
"""Maximum bytes of one read; larger than a socket's buffer."""
HANDSHAKE_S = 10.0
"""Time-out of a TLS handshake."""


FIRST_VERSION, END_VERSION = (3, 0, 12), (3, 1)
"""Versions of kafka-python whose private names are known: from the first, below the second, as in pyproject.toml."""
_REMEDY = "install it by `pip install 'kafka-python>=3.0.12,<3.1'`"


class UnsupportedClient(RuntimeError):
    """The installed kafka-python is another version, or lacks a private name that is replaced here."""


def patch_clients() -> None:
    """Replace some methods. Idempotent. Reads of encrypted connections are not changed. Raises UnsupportedClient."""
    import kafka  # imported on first use: describing a client does not need it

    _check_version(kafka.__version__)
    from kafka import KafkaAdminClient, KafkaConsumer
    from kafka.net.compat import KafkaNetClient
    from kafka.net.inet import KafkaNetSocket
    from kafka.net.selector import NetworkSelector
    from kafka.net.transport import KafkaSSLTransport, KafkaTCPTransport
    from kafka.protocol.api_header import ResponseClassRegistry
    from kafka.protocol.schemas import StructField

    _check_names(KafkaTCPTransport, "_sock_recv")
    _check_names(KafkaSSLTransport, "handshake")
    _check_names(KafkaNetSocket, "connect", "sock_connect", "socket")
    _check_names(NetworkSelector, "close", "stop", "call_soon_threadsafe")
    _check_names(KafkaNetClient, "close")
    _check_names(ResponseClassRegistry, "register_response_class", "_response_class_registry")
    _check_names(StructField, "compiled_decode_from")
    KafkaTCPTransport._sock_recv = _sock_recv
    KafkaSSLTransport.handshake = _handshake
    KafkaNetSocket.connect = _connect
    if NetworkSelector.close.__module__ != __name__:
        NetworkSelector.close = _close_with_sockets(NetworkSelector.close)
    if KafkaNetClient.close.__module__ != __name__:
        KafkaNetClient.close = _close_on_its_thread(KafkaNetClient.close)
    for client in (KafkaConsumer, KafkaAdminClient):
        if client.__init__.__module__ != __name__:
            client.__init__ = _end_with_its_failure(client.__init__)
    ResponseClassRegistry.register_response_class = classmethod(_register_response_class)
    if StructField.compiled_decode_from.__module__ != __name__:
        StructField.compiled_decode_from = _compile_one_at_a_time(StructField.compiled_decode_from)


def _check_version(version: str) -> None:
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if not FIRST_VERSION <= numbers < END_VERSION:
        raise UnsupportedClient(f"kafka-python {version} is installed, whose connections are unknown here: {_REMEDY}")


def _check_names(owner: type, *names: str) -> None:
    for name in names:
        if not hasattr(owner, name):
            raise UnsupportedClient(f"{owner.__name__} of kafka-python has no {name}: {_REMEDY}")


def _sock_recv(transport: Any) -> tuple[bytes, Exception | None]:
    """All available bytes, and the error that ended the connection, if any."""
    from kafka.errors import KafkaConnectionError

    parts: list[bytes] = []
    if (sock := transport._sock) is None:  # closed since the selector reported it readable
        return b"", KafkaConnectionError("socket closed")
    try:
        while part := sock.recv(READ_BYTES):
            parts.append(part)
    except (BlockingIOError, InterruptedError):
        return b"".join(parts), None
    except OSError as error:
        return b"".join(parts), KafkaConnectionError(error)
    return b"".join(parts), KafkaConnectionError("socket disconnected")


def _close_with_sockets(close: Callable[[Any], None]) -> Callable[[Any], None]:
    """The selector's `close`, extended to close all registered sockets."""

    def close_all(selector: Any) -> None:
        if selector._closed:
            return
        if selector._io_thread is not None:
            selector.stop()
        watched = [key.fileobj for key in selector._selector.get_map().values()]
        close(selector)
        for sock in watched:
            sock.close()

    return close_all


def _end_with_its_failure(connect: Callable[..., None]) -> Callable[..., None]:
    """A client's constructor, which ends the client's thread and closes its sockets if it fails."""

    @functools.wraps(connect)
    def connect_or_close(client: Any, *arguments: Any, **options: Any) -> None:
        try:
            connect(client, *arguments, **options)
        except BaseException:
            if hasattr(client, "_net"):
                client._net.close()
            raise

    connect_or_close.__module__ = __name__
    return connect_or_close


def _close_on_its_thread(close: Callable[..., None]) -> Callable[..., None]:
    """A client's `close`, whose connections the client's own thread closes, if it has one."""

    def close_there(client: Any, node_id: Any = None) -> None:
        thread = client._net._io_thread
        if node_id is None and thread not in (None, threading.current_thread()):
            with contextlib.suppress(Exception):  # its loop has failed, or is closed
                client._net.call_soon_threadsafe(client._manager.close)
            client._net.stop()
        close(client, node_id)

    return close_there


def _register_response_class(registry: Any, response_class: Any) -> None:
    """Register a class of responses, and not that of one of its versions, which it has itself."""
    if getattr(response_class, "_class_version", None) is None:
        registry._response_class_registry[response_class.API_KEY] = response_class


def _compile_one_at_a_time(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The decoder of a version, by `compiled`, which only one thread at a time may make."""
    lock = threading.RLock()

    def decoder(struct: Any, version: int, compact: bool = False, tagged: bool = False, data_class: Any = None) -> Any:
        known = struct._compiled_encoders.get(("decode", version, compact, tagged, data_class))
        if known is not None:
            return known
        with lock:
            return compiled(struct, version, compact=compact, tagged=tagged, data_class=data_class)

    return decoder


class _Socket(socket.socket):
    __slots__ = ()

    def __repr__(self) -> str:
        return f"<socket {self.fileno()}>"  # without system calls


async def _connect(net_socket: Any, net: Any, addrinfo: Any, socket_options: Any = (), timeout_at: Any = None) -> Any:
    """Return a connected socket; close it if connecting fails."""
    family, kind, protocol, _, address = addrinfo
    sock = _Socket(family, kind, protocol, fileno=net_socket.socket(family, kind, protocol).detach())
    try:
        sock.setblocking(False)
        for option in socket_options:
            sock.setsockopt(*option)
        return await net_socket.sock_connect(net, sock, address, timeout_at=timeout_at)
    except BaseException:
        sock.close()
        raise


async def _handshake(transport: Any) -> None:
    """Perform the TLS handshake; close the socket if it fails. Raises OSError, KafkaTimeoutError."""
    net, sock, until = transport._net, transport._sock, time.monotonic() + HANDSHAKE_S
    try:
        while True:
            try:
                return sock.do_handshake()
            except ssl.SSLWantReadError:
                await net.wait_read(sock, timeout_at=until)
            except ssl.SSLWantWriteError:
                await net.wait_write(sock, timeout_at=until)
    except BaseException:
        sock.close()
        raise


def position_in(consumer: Any, place: Any, timeout_ms: int) -> int | None:
    """The next offset that `consumer` reads in `place`, None if it gets no response in time.

    Its public `position` validates those of all partitions each time, as its `poll` does: the cost for all of them is
    the square of their number.
    """
    subscription = getattr(consumer, "_subscription", None)  # a simulated consumer has none
    state = None if subscription is None else subscription.assignment.get(place)
    if state is not None and state.position is not None:
        return int(state.position.offset)
    position: int | None = consumer.position(place, timeout_ms=timeout_ms)
    return position


def all_fetches_under_way(consumer: Any) -> bool:
    """Whether `consumer` has received nothing since its last poll, and waits for the response of every broker it reads.

    A poll would then return nothing and request nothing, after two calls to the consumer's thread. A response is among
    the completed fetches before its request counts as over, so what is read in this order is never missed.
    """
    fetcher, subscription = consumer._fetcher, consumer._subscription
    requested = fetcher._nodes_with_pending_fetch_requests
    places = subscription.fetchable_partitions()
    if len(places) < len(subscription.assignment) or fetcher._next_in_line_exception_metadata is not None:
        return False
    if not all(fetcher._select_read_replica(place) in requested for place in places):
        return False
    return not (fetcher._completed_fetches or fetcher._next_partition_records)


def request_metadata_at_once(consumer: Any) -> None:
    """Let `consumer`, just connected, request topic metadata at once.

    kafka-python waits 100 ms after the metadata of its bootstrap, as if that had failed.
    """
    consumer._cluster._last_refresh_ms = 0


def request_metadata_every(consumer: Any, ms: int) -> None:
    """Let `consumer` request topic metadata as often as every `ms` milliseconds, if it needs others.

    kafka-python waits 100 ms between two requests, also after a successful one, whatever its `retry_backoff_ms`.
    """
    consumer._cluster.config["retry_backoff_ms"] = ms


def report_resets(consumer: Any, report: Callable[[Any, int, int], None]) -> None:
    """Call `report` with the partition, the next offset and the new one when `consumer` goes on at another offset,
    because its log does not have the next one. It may be on the consumer's thread.

    kafka-python only logs it, and then not both offsets.
    """
    subscription, fetcher = consumer._subscription, consumer._fetcher
    request_reset, reset = subscription.request_offset_reset, fetcher._reset_offset_if_needed
    left: dict[Any, tuple[Any, int]] = {}  # the state of each partition, and its next offset

    def request_and_note(place: Any, strategy: Any = None) -> None:
        state = subscription.assignment[place]
        if strategy is None and state.position is not None:  # with a strategy: a seek to an end
            left[place] = state, state.position.offset
        request_reset(place, strategy)

    def reset_and_report(place: Any, timestamp: Any, offset: int) -> None:
        state, before = left.pop(place, (None, 0))
        is_due = state is not None and state is subscription.assignment.get(place) and state.awaiting_reset
        reset(place, timestamp, offset)
        if is_due:
            report(place, before, offset)

    subscription.request_offset_reset, fetcher._reset_offset_if_needed = request_and_note, reset_and_report


def offsets_by_topic(request: Callable[[list[Any]], dict[Any, int]], places: Iterable[Any]) -> dict[Any, int]:
    """What `request`, a consumer's `beginning_offsets` or `end_offsets`, returns for `places`.

    kafka-python raises KeyError if it knows the leaders of some topics only, and looks for them if it knows none.
    """
    topics: dict[str, list[Any]] = {}
    for place in places:
        topics.setdefault(place.topic, []).append(place)
    return {place: offset for of_topic in topics.values() for place, offset in request(of_topic).items()}


def fetch_at_most(consumer: Any, size: int) -> None:
    """Let `consumer` fetch at most `size` bytes of a partition at once from now on, but always a whole batch."""
    if (fetcher := getattr(consumer, "_fetcher", None)) is not None:  # a simulated consumer has none
        fetcher.config["max_partition_fetch_bytes"] = size


def read_fetched_with(consumer: Any, partition_records: type) -> None:
    """Let `consumer` read what it has fetched of a partition by this class, of `Fetcher.PartitionRecords`."""
    consumer._fetcher.PartitionRecords = partition_records


def records_in(batch: Any) -> bytes:
    """The encoded records of `batch` (a DefaultRecordBatch), uncompressed."""
    batch._maybe_uncompress()
    return bytes(memoryview(batch._buffer)[batch._pos :])


def force_close(producer: Any) -> None:
    """End the thread of `producer`: `close` alone waits for brokers, and leaves the thread after its time-out."""
    producer._sender.force_close()


def write_commit_marker(admin: Any, spec: Any, place: Any) -> None:
    """Commit the transaction of `spec` in partition `place`: the client has a call for aborts alone."""
    request = admin._abort_transaction_request(spec)
    request.markers[0].transaction_result = True
    leader = next(iter(admin._manager.run(admin._async_get_leader_for_partitions, [place])))
    response = admin._manager.run(lambda: admin._manager.send(request, node_id=leader))
    admin._abort_transaction_process_response(response, spec)


class ProducerParts(NamedTuple):
    """The parts of a transactional producer: the transaction manager, its sender thread, and the sender's client."""

    transactions: Any
    sender: Any
    client: Any

    @classmethod
    def of(cls, producer: Any) -> ProducerParts:
        """The parts of `producer`."""
        return cls(producer._transaction_manager, producer._sender, producer._sender._client)

    def replace_enqueue(self, enqueue: Callable[[Any], None]) -> Callable[[Any], None]:
        """Let the manager queue its requests by `enqueue`; returns the function that has done it so far."""
        before: Callable[[Any], None] = self.transactions._enqueue_request
        self.transactions._enqueue_request = enqueue
        return before

    def look_for_batches_when_locked(self) -> None:
        """Let the manager look for records that are not written under its lock, before it ends a transaction.

        kafka-python looks first and takes the lock then: of a thread that sends a record and commits in between, it
        ends the transaction without the record.
        """
        manager, accumulator = self.transactions, self.sender._accumulator
        next_request_handler = manager.next_request_handler

        def look_and_take(has_incomplete_batches: bool) -> Any:
            with manager._lock:
                return next_request_handler(accumulator.has_incomplete)

        manager.next_request_handler = look_and_take

    def request_metadata(self, topics: Iterable[str]) -> None:
        """Request the metadata of `topics` that the producer lacks, at once. Does not wait.

        kafka-python requests it when the first record of a topic is sent, and 100 ms after its last request.
        """
        cluster = self.sender._metadata
        if missing := {topic for topic in topics if cluster.partitions_for_topic(topic) is None}:
            cluster._last_refresh_ms = 0
            for topic in missing:
                self.sender.add_topic(topic)

    def connections(self) -> dict[Any, Any]:
        """The present connection to each node."""
        return dict(self.client._manager._conns)
