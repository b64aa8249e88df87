"""The Flight endpoint on a real broker: streams, resumption, limits, and authentication."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest
from exported_topics import Laminar, Topics
from pyarrow import flight

from infra.kafka.admin import admin_client, delete_records
from infra.kafka.properties import ClientProperties
from operators.export import flight as serving
from operators.export.flight import TopicServer
from operators.export.tickets import Ticket, parse_ticket
from schemas.topics import EXPERIENCES

TOKEN = "a-token-of-many-characters"


@pytest.fixture
def client(topics: Topics) -> Iterator[flight.FlightClient]:
    with TopicServer(topics.client, topics.run) as server, flight.connect(server.location) as connected:
        yield connected


def read(client: flight.FlightClient, ticket: dict[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    """The trajectory ids of a ticket's stream, and the metadata of its batches."""
    names, metadata = [], []
    for chunk in client.do_get(flight.Ticket(json.dumps(ticket).encode())):
        names += chunk.data["trajectory_id"].to_pylist()
        if chunk.app_metadata is not None and len(chunk.app_metadata):
            metadata.append(json.loads(chunk.app_metadata.to_pybytes()))
    return names, metadata


def test_flight_endpoint_reports_that_its_port_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen at 127.0.0.1:{port}: Address already in use"):
            TopicServer(ClientProperties({"bootstrap.servers": "127.0.0.1:1"}), "sums", port=port)


def test_flight_ticket_returns_rows_committed_at_its_creation(topics: Topics, client: flight.FlightClient) -> None:
    topics.write(range(6))
    topics.write(range(100, 102), commit=False)
    topics.write_garbage()
    info = client.get_flight_info(flight.FlightDescriptor.for_path("experiences"))
    topics.write(range(6, 8))
    names, metadata = [], []
    for endpoint in info.endpoints:
        more, more_metadata = read(client, json.loads(endpoint.ticket.ticket))
        names += more
        metadata += more_metadata
    assert sorted(names) == sorted(f"p{n}.{m}" for n in range(6) for m in (0, 1))
    assert sum(each["undecodable"] for each in metadata) == 4
    assert info.schema.names[0] == "trajectory_id"
    topics_listed = [json.loads(each.descriptor.command)["topic"] for each in client.list_flights()]
    assert topics_listed == ["experiences", "metrics", "restore"]


def test_flight_stream_resumes_from_next_offset(
    topics: Topics, client: flight.FlightClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "BATCH_ROWS", 4)
    topics.write(range(0, 20, 2))
    ticket = {"topic": "experiences", "from": {"0": 0}}
    chunk = client.do_get(flight.Ticket(json.dumps(ticket).encode())).read_chunk()
    first = chunk.data["trajectory_id"].to_pylist()
    next_offset = json.loads(chunk.app_metadata.to_pybytes())["next"]
    rest, _ = read(client, {**ticket, "from": {"0": next_offset}})
    assert len(first) == 4
    assert first + rest == [f"p{n}.{m}" for n in range(0, 20, 2) for m in (0, 1)]


def test_flight_names_deleted_offsets_of_a_ticket(topics: Topics, client: flight.FlightClient) -> None:
    topics.write(range(0, 20, 2))
    name = EXPERIENCES.name(topics.run)
    with admin_client(topics.client) as admin:
        delete_records(admin, {(name, 0): 5})
    with pytest.raises(pa.ArrowInvalid, match=f"offsets 3 to 4 of {name}, partition 0, were deleted: begin at 5"):
        read(client, {"topic": "experiences", "from": {"0": 3}})
    whole, _ = read(client, {"topic": "experiences", "from": {"0": 0}})
    assert read(client, {"topic": "experiences", "from": {"0": 5}})[0] == whole != []


def test_flight_applies_filters_views_and_offsets(topics: Topics, client: flight.FlightClient) -> None:
    topics.write(range(6))
    request = {"topic": "experiences", "where": "reward > 0.5", "from": "-3", "view": "trl"}
    stream = client.do_get(flight.Ticket(json.dumps(request).encode()))
    table = stream.read_all()
    assert sorted(table["trajectory_id"].to_pylist()) == ["p2.0", "p3.0", "p4.0", "p5.0"]
    assert table.schema.names[:2] == ["prompt", "completion"]
    assert read(client, {"topic": "experiences", "from": "end"})[0] == []


def test_flight_follow_streams_new_rows(topics: Topics, client: flight.FlightClient) -> None:
    topics.write(range(2))
    ticket = flight.Ticket(json.dumps({"topic": "experiences", "follow": True}).encode())
    stream = client.do_get(ticket)
    names: list[str] = []
    while len(names) < 4:
        names += stream.read_chunk().data["trajectory_id"].to_pylist()
    topics.write(range(2, 4))
    while len(names) < 8:
        names += stream.read_chunk().data["trajectory_id"].to_pylist()
    stream.cancel()
    assert sorted(names) == sorted(f"p{n}.{m}" for n in range(4) for m in (0, 1))


@pytest.mark.parametrize(
    ("ticket", "reason"),
    [
        (b"\xff", "a ticket must be JSON"),
        (b"[]", "a ticket must be a JSON object"),
        (b"{}", "a ticket must have a topic"),
        (b'{"topic": "experiencs"}', "did you mean 'experiences'"),
        (b'{"topic": "experiences", "form": 1}', "did you mean 'from'"),
        (b'{"topic": "experiences", "where": 1}', "where must be of type str"),
        (b'{"topic": "experiences", "where": "rewrad > 1"}', "the nearest is reward"),
        (b'{"topic": "experiences", "from": "then"}', "'then'"),
        (b'{"topic": "experiences", "from": {"9": 0}}', "has no partition 9"),
        (b'{"topic": "experiences", "from": {"0": -1}}', "a negative partition or offset"),
        (b'{"topic": "experiences", "from": [1]}', "an offset for each partition"),
        (b'{"topic": "experiences", "view": "preference"}', "the view preference needs complete files"),
        (b'{"topic": "metrics", "view": "sft"}', "the view sft is of experiences"),
        (b'{"topic": "experiences", "follow": true, "until": {"0": 1}}', "not both"),
        (b" " * 70_000, "at most 65536 bytes"),
        (b'{"topic": "prompts"}', "there is no topic"),
    ],
)
def test_flight_rejects_invalid_tickets(client: flight.FlightClient, ticket: bytes, reason: str) -> None:
    with pytest.raises((pa.ArrowInvalid, flight.FlightServerError), match=reason):
        client.do_get(flight.Ticket(ticket)).read_all()


def test_ticket_round_trips() -> None:
    ticket = Ticket("experiences", "reward > 1", "trl", {0: 5}, {0: 9})
    assert parse_ticket(ticket.encode()) == ticket


def test_flight_rejects_writes_and_actions(client: flight.FlightClient) -> None:
    descriptor = flight.FlightDescriptor.for_path("experiences")
    with pytest.raises(NotImplementedError):
        client.do_put(descriptor, pa.schema([]))[0].close()
    with pytest.raises(NotImplementedError):
        list(client.do_action(flight.Action("delete", b"")))


def test_flight_bounds_streams_and_releases_them(
    topics: Topics, client: flight.FlightClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics.write(range(2))
    for _ in range(serving.MAX_STREAMS + 2):
        assert len(read(client, {"topic": "experiences"})[0]) == 4
    with TopicServer(topics.client, topics.run) as server, flight.connect(server.location) as second_client:
        for _ in range(serving.MAX_STREAMS):
            server._streams.acquire()
        with pytest.raises(flight.FlightUnavailableError, match="streams are in use"):
            read(second_client, {"topic": "experiences"})


def test_flight_releases_streams_of_disconnected_readers(topics: Topics) -> None:
    topics.write(range(2))
    ticket, chances = flight.Ticket(b'{"topic": "experiences"}'), random.Random(0)
    with TopicServer(topics.client, topics.run) as server:
        for number in range(40):  # disconnects before the first batch, between two, or after the last
            with flight.connect(server.location) as client:
                options = flight.FlightCallOptions(timeout=chances.uniform(0.0005, 0.01) if number % 2 else 10.0)
                with suppress(pa.ArrowException, OSError):
                    reader = client.do_get(ticket, options)
                    reader.read_chunk()
                    reader.cancel()
        deadline = time.monotonic() + 30
        while server._streams._value < serving.MAX_STREAMS and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server._streams._value == serving.MAX_STREAMS


def test_flight_releases_a_stream_that_is_never_read() -> None:
    released: list[int] = []
    stream = serving._Stream(lambda: released.append(1))
    stream.batches = iter([(pa.RecordBatch.from_pylist([], schema=pa.schema([])), b"")])
    del stream
    assert released == [1]
    ended = serving._Stream(lambda: released.append(2))
    assert list(ended) == []
    del ended
    assert released == [1, 2]


def test_flight_rejects_clients_without_token(topics: Topics) -> None:
    topics.write(range(2))
    with TopicServer(topics.client, topics.run, token=TOKEN) as server, flight.connect(server.location) as client:
        for headers in ([], [(b"authorization", b"Bearer another")]):
            with pytest.raises(flight.FlightUnauthenticatedError, match="needs the header authorization"):
                list(client.list_flights(options=flight.FlightCallOptions(headers=headers)))
        options = flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {TOKEN}".encode())])
        assert len(list(client.list_flights(options=options))) == 3


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--host", "0.0.0.0"), "give --token-file"),
        (("--host", "kafka.example"), "give --token-file"),
        (("--host", "0.0.0.0", "--token-file", "token"), "--certificate and --key"),
        (("--host", "0.0.0.0", "--certificate", "me.pem", "--key", "me.key"), "give --token-file"),
        (("--key", "x"), "give both options or neither"),
    ],
)
def test_export_serve_requires_token_beyond_loopback(laminar: Laminar, arguments: tuple[str, ...], reason: str) -> None:
    code, _, err = laminar("export", "serve", *arguments)
    assert code == 2
    assert reason in " ".join(err.replace("│", " ").split())


@pytest.mark.parametrize("token", ["", TOKEN])
def test_topic_server_requires_token_and_tls_beyond_loopback(token: str) -> None:
    with pytest.raises(ValueError, match=r"0\.0\.0\.0 accepts connections from other machines, so it needs a "):
        TopicServer(ClientProperties.at("127.0.0.1:1"), "a-run", "0.0.0.0", token=token)


def test_export_serve_stops_on_sigterm(topics: Topics) -> None:
    topics.write(range(2))
    brokers = ClientProperties.at(topics.client.bootstrap_servers).bootstrap_servers
    arguments = [
        sys.executable,
        "-c",
        "from pipelines.cli.main import main; main()",
        "export",
        "serve",
        "--run",
        topics.run,
        "-b",
        brokers,
    ]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env={**os.environ}) as process:
        assert process.stdout is not None
        location = process.stdout.readline().split()[-1]
        with flight.connect(location) as client:
            schema = client.get_schema(flight.FlightDescriptor.for_path(EXPERIENCES.short_name)).schema
            assert len(read(client, {"topic": "experiences"})[0]) == 4
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert "reward" in schema.names
