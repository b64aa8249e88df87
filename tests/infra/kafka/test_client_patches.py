"""What kafka-python's connections do wrong is put right."""

from __future__ import annotations

import asyncio
import gc
import pkgutil
import socket
import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from kafka import KafkaConsumer, TopicPartition
from kafka.cluster import ClusterMetadata
from kafka.consumer.fetcher import Fetcher
from kafka.consumer.subscription_state import SubscriptionState
from kafka.errors import KafkaConnectionError
from kafka.future import Future
from kafka.net.compat import KafkaNetClient
from kafka.net.inet import KafkaNetSocket
from kafka.net.selector import NetworkSelector
from kafka.net.transport import KafkaTCPTransport
from kafka.protocol.api_header import ResponseClassRegistry
from kafka.protocol.metadata import MetadataResponse

from infra.kafka import clients
from infra.kafka.client_patches import (
    END_VERSION,
    FIRST_VERSION,
    UnsupportedClient,
    all_fetches_under_way,
    patch_clients,
    request_metadata_at_once,
    request_metadata_every,
)
from infra.kafka.clients import SessionConsumer


@pytest.fixture(autouse=True)
def _patched() -> None:
    """As the first client of a process does."""
    patch_clients()


@pytest.mark.parametrize("version", ["2.3.0", "3.0.11", "3.1.0", "4.0", "unknown"])
def test_patch_rejects_an_unknown_version(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kafka.__version__", version)
    with pytest.raises(UnsupportedClient, match=rf"kafka-python {version} .*pip install 'kafka-python>=3.0.12,<3.1'"):
        patch_clients()


@pytest.mark.parametrize("version", ["3.0.12", "3.0.13", "3.0.99.dev1"])
def test_patch_accepts_later_patch_versions(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kafka.__version__", version)
    patch_clients()


def test_patch_names_a_missing_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(KafkaTCPTransport, "_sock_recv")
    with pytest.raises(UnsupportedClient, match="KafkaTCPTransport of kafka-python has no _sock_recv"):
        patch_clients()


def test_supported_versions_are_those_of_the_package() -> None:
    first, end = (".".join(map(str, version)) for version in (FIRST_VERSION, END_VERSION))
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    (wanted,) = [each for each in tomllib.loads(text)["project"]["dependencies"] if each.startswith("kafka-python")]
    assert wanted.endswith(f"]>={first},<{end}")


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        ("kafka.consumer.fetcher:Fetcher", ("PartitionRecords", "_reset_offset_if_needed")),
        ("kafka.consumer.subscription_state:SubscriptionState", ("request_offset_reset",)),
        ("kafka.admin:KafkaAdminClient", ("_abort_transaction_request", "_abort_transaction_process_response")),
        ("kafka.admin:KafkaAdminClient", ("_async_get_leader_for_partitions",)),
        ("kafka.record.default_records:DefaultRecordBatch", ("_maybe_uncompress",)),
        ("kafka.producer.sender:Sender", ("force_close", "add_topic")),
        ("kafka.cluster:ClusterMetadata", ("ttl", "request_update", "partitions_for_topic")),
    ],
)
def test_client_has_the_private_names_that_are_used(owner: str, names: tuple[str, ...]) -> None:
    assert [name for name in names if not hasattr(pkgutil.resolve_name(owner), name)] == []


def test_metadata_is_requested_without_a_pause_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause is there after any request, also a successful one: see whether kafka-python still has it so."""
    monkeypatch.setattr("kafka.cluster.time", SimpleNamespace(monotonic=lambda: 100.0))
    cluster = ClusterMetadata(bootstrap_servers=["127.0.0.1:9"])
    consumer = SimpleNamespace(_cluster=cluster)
    cluster._need_update, cluster._last_refresh_ms = True, 100_000.0
    assert cluster.ttl() == 100
    request_metadata_every(consumer, 5)
    assert cluster.ttl() == 5
    request_metadata_at_once(consumer)
    assert cluster.ttl() == 0


def test_recv_reads_all_bytes_before_disconnect() -> None:
    patch_clients()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        transport = SimpleNamespace(_sock=ours)
        assert KafkaTCPTransport._sock_recv(transport) == (b"", None)
        theirs.sendall(b"x" * 100_000)
        assert KafkaTCPTransport._sock_recv(transport) == (b"x" * 100_000, None)
        theirs.sendall(b"last words")
        theirs.close()
        words, error = KafkaTCPTransport._sock_recv(transport)
        assert words == b"last words"
        assert "socket disconnected" in str(error)


def start(net: NetworkSelector) -> None:
    """Start the loop of `net`, which forgets a request to stop that comes before it runs."""

    async def nothing() -> None:
        pass

    net.start()
    net.run(nothing)


def test_client_closes_its_connections_on_its_own_thread() -> None:
    net, closed_by = NetworkSelector(client_id="test"), []
    manager = SimpleNamespace(close=lambda node_id=None: closed_by.append(threading.current_thread().name))
    client = KafkaNetClient(net, manager)
    start(net)
    client.close()
    assert closed_by[0] == "kafka-io-test"


@pytest.mark.parametrize("running", [False, True])
def test_client_without_its_loop_closes_its_connections(running: bool) -> None:
    net, closed_by = NetworkSelector(client_id="test"), []
    manager = SimpleNamespace(close=lambda node_id=None: closed_by.append(threading.current_thread()))
    if running:
        start(net)
        net._exception = RuntimeError("the loop has failed")
    KafkaNetClient(net, manager).close()
    assert closed_by == [threading.current_thread()]


def test_recv_of_a_closed_transport_is_an_error() -> None:
    """Another task may close it between the selector's report and the read."""
    received, error = KafkaTCPTransport._sock_recv(SimpleNamespace(_sock=None))
    assert received == b""
    assert isinstance(error, KafkaConnectionError)


@pytest.mark.parametrize("ends", [ConnectionRefusedError, asyncio.CancelledError])
def test_connect_closes_socket_after_failure(ends: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    patch_clients()
    opened: list[socket.socket] = []

    async def fail(made: object, net: object, sock: socket.socket, address: object, timeout_at: object) -> None:
        opened.append(sock)
        raise ends

    monkeypatch.setattr(KafkaNetSocket, "sock_connect", fail)
    address = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", 9))
    with pytest.raises(ends):
        asyncio.run(KafkaNetSocket().connect(None, address))
    assert [sock.fileno() for sock in opened] == [-1]


def test_connected_socket_is_formatted_without_system_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_clients()

    async def connect(made: object, net: object, sock: socket.socket, address: object, timeout_at: object) -> object:
        return sock

    monkeypatch.setattr(KafkaNetSocket, "sock_connect", connect)
    address = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", 9))
    with asyncio.run(KafkaNetSocket().connect(None, address)) as sock:
        monkeypatch.setattr(socket.socket, "getsockname", Mock(side_effect=AssertionError), raising=False)
        assert repr(sock) == f"<socket {sock.fileno()}>"


def test_response_whose_class_two_threads_made_is_read() -> None:
    """The second class is registered last, and the first is kept."""
    patch_clients()
    version, versions = MetadataResponse.max_version, MetadataResponse._VERSIONS
    kept = MetadataResponse[version]
    del versions[version]
    assert MetadataResponse[version] is not kept
    versions[version] = kept
    gc.collect()
    header = SimpleNamespace(request_api_key=MetadataResponse.API_KEY, request_api_version=version)
    assert ResponseClassRegistry.get_response_class(header) is kept


def test_decoders_are_made_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_clients()
    version, struct = MetadataResponse.max_version, MetadataResponse._struct
    monkeypatch.setattr(struct, "_compiled_encoders", {})
    emit, begun, together, inside = struct.emit_decode_from, threading.Event(), threading.Event(), []

    def emit_slowly(*arguments: Any, **options: Any) -> None:
        inside.append(None)
        if len(inside) > 1:
            together.set()
        begun.set()
        together.wait(0.2)
        emit(*arguments, **options)
        inside.pop()

    monkeypatch.setattr(struct, "emit_decode_from", emit_slowly)
    make = partial(struct.compiled_decode_from, version, compact=True, tagged=True, data_class=MetadataResponse)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(make)
        begun.wait()
        assert threads.submit(make).result() is first.result() is make()
    assert not together.is_set()


PLACES = [TopicPartition("a", 0), TopicPartition("a", 1)]


class Reader:
    """What a consumer has, whose two partitions are led by brokers 0 and 1: a real fetcher without connections."""

    def __init__(self) -> None:
        self._subscription = SubscriptionState("none")
        self._subscription.assign_from_user(PLACES)
        for place in PLACES:
            self._subscription.seek(place, 5)
        cluster = Mock(leader_for_partition=lambda place: place.partition, leader_epoch_for_partition=lambda place: 0)
        self.sent: list[int] = []
        manager = Mock(cluster=cluster, broker_version=(4, 0), send=self._send)
        manager.connection_delay.return_value = 0
        client = Mock(_manager=manager)
        client.throttle_delay.return_value = 0
        self._fetcher = Fetcher(client, self._subscription, metrics=None)

    def _send(self, request: Any, node_id: int) -> Future:
        self.sent.append(node_id)
        return Future()

    def send_fetches(self) -> list[int]:
        """Request what a poll would; returns the brokers to which something was sent."""
        self.sent = []
        with suppress(StopIteration):
            self._fetcher._send_fetches_async().send(None)
        return self.sent


def test_all_fetches_are_under_way_if_a_poll_would_send_none() -> None:
    reader = Reader()
    assert not all_fetches_under_way(reader)
    assert reader.send_fetches() == [0, 1]
    assert all_fetches_under_way(reader)
    assert reader.send_fetches() == []
    first, _ = list(reader._fetcher._fetch_futures)
    first.failure(KafkaConnectionError("gone"))
    assert not all_fetches_under_way(reader)
    assert reader.send_fetches() == [0]


def test_fetched_records_are_read_by_the_next_poll() -> None:
    reader = Reader()
    reader.send_fetches()
    record = SimpleNamespace(topic_partition=PLACES[0], next_fetch_offset=5)
    for name, value in (
        ("_completed_fetches", [record]),
        ("_next_partition_records", record),
        ("_next_in_line_exception_metadata", object()),
    ):
        before = getattr(reader._fetcher, name)
        setattr(reader._fetcher, name, value)
        assert not all_fetches_under_way(reader), name
        setattr(reader._fetcher, name, before)
    assert all_fetches_under_way(reader)
    reader._subscription.request_offset_reset(PLACES[1])
    assert not all_fetches_under_way(reader)


def test_consumer_polls_in_full_when_due(monkeypatch: pytest.MonkeyPatch) -> None:
    full: list[float] = []
    now, under_way = 100.0, True
    monkeypatch.setattr(KafkaConsumer, "poll", lambda consumer, timeout_ms: full.append(now))
    monkeypatch.setattr(clients, "all_fetches_under_way", lambda consumer: under_way)
    monkeypatch.setattr(clients.time, "monotonic", lambda: now)
    consumer = SessionConsumer.__new__(SessionConsumer)
    consumer._closed = True  # it has no connections to close
    for at, wait_ms, fetching in (
        (100.0, 0, True),  # the first
        (100.1, 0, True),
        (100.2, 5, True),  # a wait
        (100.3, 0, True),
        (100.4, 0, False),  # something to read or to request
        (100.8, 0, True),
        (100.9, 0, True),  # half a second after the last
    ):
        now, under_way = at, fetching
        consumer.poll(wait_ms)
    assert full == [100.0, 100.2, 100.4, 100.9]
