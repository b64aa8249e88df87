"""A Flight endpoint on a run's topics: any Arrow client reads rows as they are written, and nobody writes.

Each stream is a reader of its own, of no consumer group. Its batches are bounded, and each says in its metadata where
the next one begins, `{"partition": 0, "next": 17, "undecodable": 0}`, so that who was cut off goes on from there.
"""

from __future__ import annotations

import hmac
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import flight

from infra.kafka.offset_span import parse_span
from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import PartitionRange, UnknownTopic, partition_ranges, resolve_span
from infra.kafka.topic_reader import StoredRecord, follow_topic, read_topic
from infra.listening import is_loopback
from operators.export.columns import RecordRows, as_table
from operators.export.config import Contents
from operators.export.tickets import Ticket, parse_ticket
from schemas.block import Block
from schemas.block_codec import decode_as_block
from schemas.topics import CATALOGUE

BATCH_ROWS = 4096
BATCH_BYTES = 8 << 20
"""Rows are sent when they are so many, or take so much memory; a Kafka record is never taken apart for less."""
MOST_STREAMS = 16
"""Each reads from Kafka for itself; more are told to come again."""


def read_token(file: Path) -> str:
    """The token in `file`. Raises ValueError where there is none to speak of."""
    token = file.read_text(encoding="utf-8").strip()
    if len(token) < 16:
        raise ValueError(f"{file} must hold a token of 16 characters or more: `openssl rand -hex 32 > {file}`")
    return token


class TopicServer(flight.FlightServerBase):
    """Serves the topics of `run`. With `token` every call must bear it; `certificate` and its key make it TLS.

    Raises ValueError where other machines would reach it without both: a token in clear text is anybody's.
    """

    def __init__(
        self,
        client: ClientProperties,
        run: str,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
        certificate: tuple[bytes, bytes] | None = None,
    ) -> None:
        if not is_loopback(host) and not (token and certificate):
            lacks = "a certificate: its token would travel in clear text" if token else "a token and a certificate"
            raise ValueError(f"{host} is reached from other machines, and there is not {lacks}")
        self._client, self._run = client, run
        self._streams = threading.BoundedSemaphore(MOST_STREAMS)
        self._closing = threading.Event()
        self.host, self._scheme = host, "grpc+tls" if certificate else "grpc"
        super().__init__(
            f"{self._scheme}://{host}:{port}",
            middleware={"token": _TokenFactory(token)} if token else None,
            tls_certificates=[certificate] if certificate else None,
        )

    @property
    def location(self) -> str:
        """Where clients connect to."""
        return f"{self._scheme}://{self.host}:{self.port}"

    def shutdown(self) -> None:
        """End all streams, then the endpoint."""
        self._closing.set()
        super().shutdown()

    def list_flights(self, context: Any, criteria: bytes) -> Iterator[flight.FlightInfo]:
        """A flight for each topic of the run."""
        for short_name in CATALOGUE:
            try:
                yield self._info(Ticket(short_name))
            except UnknownTopic:
                continue

    def get_flight_info(self, context: Any, descriptor: flight.FlightDescriptor) -> flight.FlightInfo:
        """The columns of what a ticket (as command) or a topic (as path) names, and a ticket for each partition."""
        return self._info(self._asked(descriptor))

    def get_schema(self, context: Any, descriptor: flight.FlightDescriptor) -> flight.SchemaResult:
        """The columns of what a ticket or a topic names."""
        return flight.SchemaResult(self._contents(self._asked(descriptor)).schema)

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.GeneratorStream:
        """The rows that a ticket names."""
        wish = _checked(lambda: parse_ticket(ticket.ticket))
        contents = self._contents(wish)
        ranges = self._ranges(wish)
        if not self._streams.acquire(blocking=False):
            raise flight.FlightUnavailableError(f"{MOST_STREAMS} streams are being read: come again")
        stream = _Stream(self._streams.release)
        stream.batches = self._stream(context, wish, contents, ranges)
        return flight.GeneratorStream(contents.schema, stream)

    def _asked(self, descriptor: flight.FlightDescriptor) -> Ticket:
        if descriptor.descriptor_type == flight.DescriptorType.CMD:
            return _checked(lambda: parse_ticket(descriptor.command))
        return _checked(lambda: Ticket(b"/".join(descriptor.path).decode(errors="replace")))

    def _contents(self, wish: Ticket) -> Contents:
        return _checked(lambda: wish.contents(self._run))

    def _info(self, wish: Ticket) -> flight.FlightInfo:
        contents, ranges = self._contents(wish), self._ranges(wish)
        descriptor = flight.FlightDescriptor.for_command(wish.encode())
        endpoints = []
        for partition, held in ranges.items():
            until = {} if wish.follow else {partition: held.end}
            part = Ticket(wish.topic, wish.where, wish.view, {partition: held.beginning}, until, wish.follow)
            endpoints.append(flight.FlightEndpoint(part.encode(), []))
        return flight.FlightInfo(contents.schema, descriptor, endpoints, -1, -1)

    def _ranges(self, wish: Ticket) -> dict[int, PartitionRange]:
        """What to read of each partition. Raises UnknownTopic, and ArrowInvalid for a place that is none."""
        name = CATALOGUE[wish.topic].name(self._run)
        if isinstance(wish.start, str):
            span = _checked(lambda: parse_span([wish.start], time.time_ns() // 1_000_000))  # type: ignore[list-item]
            ranges = resolve_span(self._client, name, span)
        else:
            held = partition_ranges(self._client, name)
            if missing := sorted(wish.start.keys() - held.keys()):
                raise pa.ArrowInvalid(f"{name} has no partition {missing[0]}")
            ranges = {
                partition: PartitionRange(max(offset, held[partition].beginning), held[partition].end)
                for partition, offset in wish.start.items()
            }
        return {
            partition: PartitionRange(each.beginning, min(each.end, wish.until.get(partition, each.end)))
            for partition, each in ranges.items()
        }

    def _stream(
        self, context: Any, wish: Ticket, contents: Contents, ranges: Mapping[int, PartitionRange]
    ) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        if wish.follow:
            yield from self._follow(context, contents, ranges)
            return
        for partition, held in ranges.items():
            gathered = _Gathered(contents, partition, held.beginning)
            for record in self._read(contents, partition, held):
                yield from gathered.take(record)
            yield from gathered.batches(held.end)

    def _follow(
        self, context: Any, contents: Contents, ranges: Mapping[int, PartitionRange]
    ) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        gathered = {p: _Gathered(contents, p, held.beginning) for p, held in ranges.items()}
        start = {p: held.beginning for p, held in ranges.items()}
        for records in follow_topic(self._client, contents.of.name(self._run), start, _decode):
            for record in records:
                yield from gathered[record.partition].take(record)
            for each in gathered.values():  # what has come is not kept waiting for more
                yield from each.batches()
            if context.is_cancelled() or self._closing.is_set():
                return

    def _read(self, contents: Contents, partition: int, held: PartitionRange) -> Iterator[StoredRecord]:
        return read_topic(
            self._client,
            contents.of.name(self._run),
            start={partition: held.beginning},
            partitions=[partition],
            until={partition: held.end},
            decoder=_decode,
        )


class _Stream:
    """The batches of one call, and its slot, which is free again when they end, fail or are dropped.

    Flight drops a stream unread where its caller is gone before the first batch; a generator that was never started
    runs none of its `finally`, so the slot hangs on this object instead.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self._free = weakref.finalize(self, release)
        self.batches: Iterator[tuple[pa.RecordBatch, bytes]] = iter(())

    def __iter__(self) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        return self

    def __next__(self) -> tuple[pa.RecordBatch, bytes]:
        try:
            return next(self.batches)
        except BaseException:
            self._free()
            raise


class _Gathered:
    """Rows of one partition that are not sent yet, from offset `first` on."""

    def __init__(self, contents: Contents, partition: int, first: int) -> None:
        self._contents, self._partition, self._next = contents, partition, first
        self._sent = first
        self._placed: list[RecordRows] = []
        self._rows = self._bytes = self._undecodable = 0

    def take(self, record: StoredRecord) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        """Take in a record; what is to be sent now."""
        self._next = record.offset + 1
        if record.error is not None or record.rows[0].kind not in self._contents.of.record_classes:
            self._undecodable += 1
            return
        self._placed.append(RecordRows.of_one(record.rows[0], record.offset, record.timestamp))
        self._rows += len(record.rows[0])
        self._bytes += record.size
        if self._rows >= BATCH_ROWS or self._bytes >= BATCH_BYTES:
            yield from self.batches()

    def batches(self, end: int | None = None) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        """All that has been gathered; nothing stands before `end` that is not in it."""
        self._next = max(self._next, end or 0)
        if self._next == self._sent:
            return
        contents = self._contents
        rows = contents.made(contents.kept(as_table(contents.of, self._partition, self._placed)))
        said = {"partition": self._partition, "next": self._next, "undecodable": self._undecodable}
        empty = pa.RecordBatch.from_pylist([], schema=rows.schema)
        *before, last = rows.combine_chunks().to_batches(max_chunksize=BATCH_ROWS) or [empty]
        yield from ((batch, b"") for batch in before)
        yield last, json.dumps(said).encode()
        self._placed, self._sent = [], self._next
        self._rows = self._bytes = self._undecodable = 0


class _TokenFactory(flight.ServerMiddlewareFactory):
    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    def start_call(self, info: Any, headers: Mapping[str, list[Any]]) -> None:
        """Let in who bears the token."""
        borne = next((values[0] for name, values in headers.items() if name.lower() == "authorization" and values), "")
        given = borne if isinstance(borne, bytes) else borne.encode()
        if not hmac.compare_digest(given, self._expected):
            raise flight.FlightUnauthenticatedError("this endpoint asks for a token: authorization: Bearer TOKEN")


def _decode(value: bytes | None, headers: Iterable[tuple[str, bytes]]) -> tuple[Block]:
    return (decode_as_block(value, headers),)


def _checked(make: Callable[[], Any]) -> Any:
    """What `make` returns; what it finds wrong is the caller's fault."""
    try:
        return make()
    except ValueError as error:
        raise pa.ArrowInvalid(str(error)) from error
