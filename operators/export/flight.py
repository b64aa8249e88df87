"""A read-only Arrow Flight endpoint on a run's topics: any Arrow client can read rows as they are written.

Each stream has a reader of its own, without a consumer group. Its batches are bounded. The metadata of a batch has the
next offset, `{"partition": 0, "next": 17, "undecodable": 0}`, so that a client can continue after a disconnect.
"""

from __future__ import annotations

import hmac
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyarrow import flight

from infra.clocks import wall_ms
from infra.kafka.offset_span import parse_span
from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import PartitionRange, UnknownTopic, partition_ranges, resolve_span
from infra.kafka.topic_reader import StoredRecord, follow_topic, read_partition
from infra.listening import is_loopback, port_problem
from operators.export.columns import RecordRows, as_table
from operators.export.config import Contents
from operators.export.tickets import Ticket, parse_ticket
from schemas.block_codec import decode_as_blocks
from schemas.topics import CATALOGUE

BATCH_ROWS = 4096
BATCH_BYTES = 8 << 20
"""A batch is sent when it has this many rows or bytes; a Kafka record is never split for the byte bound."""
MAX_STREAMS = 16
"""Concurrent streams, each with its own Kafka reader; further requests get FlightUnavailableError."""


class TopicServer(flight.FlightServerBase):
    """Serves the topics of `run`. With `token` every call must carry it; `certificate` (and key) enables TLS.
    `tokenizer`: as in `Contents`.

    Raises ValueError if other machines could connect without both: a token in clear text can be read by anybody;
    OSError if it cannot listen at `host` and `port`.
    """

    def __init__(
        self,
        client: ClientProperties,
        run: str,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
        certificate: tuple[bytes, bytes] | None = None,
        tokenizer: str = "",
    ) -> None:
        if not is_loopback(host) and not (token and certificate):
            missing = (
                "a certificate: without it the token is sent in clear text" if token else "a token and a certificate"
            )
            raise ValueError(f"{host} accepts connections from other machines, so it needs {missing}")
        self._client, self._run, self._tokenizer = client, run, tokenizer
        self._streams = threading.BoundedSemaphore(MAX_STREAMS)
        self._closing = threading.Event()
        if reason := port_problem(host, port):  # gRPC would print lines of its own
            raise OSError(f"cannot listen at {host}:{port}: {reason}; choose another port")
        self.host, self._scheme = host, "grpc+tls" if certificate else "grpc"
        try:
            super().__init__(
                f"{self._scheme}://{host}:{port}",
                middleware={"token": _TokenFactory(token)} if token else None,
                tls_certificates=[certificate] if certificate else None,
            )
        except pa.ArrowException as error:
            raise OSError(f"cannot listen at {host}:{port}: {error}") from error

    @property
    def location(self) -> str:
        """The URI for clients."""
        return f"{self._scheme}://{self.host}:{self.port}"

    def shutdown(self) -> None:
        """Stop all streams, then the endpoint."""
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
        """The columns and a ticket for each partition, for a ticket (as command) or a topic (as path)."""
        return self._info(self._ticket(descriptor))

    def get_schema(self, context: Any, descriptor: flight.FlightDescriptor) -> flight.SchemaResult:
        """The columns for a ticket or a topic."""
        return flight.SchemaResult(self._contents(self._ticket(descriptor)).schema)

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.GeneratorStream:
        """The rows of a ticket."""
        request = _as_client_error(lambda: parse_ticket(ticket.ticket))
        contents = self._contents(request)
        ranges = self._ranges(request)
        if not self._streams.acquire(blocking=False):
            raise flight.FlightUnavailableError(f"all {MAX_STREAMS} streams are in use: try again later")
        stream = _Stream(self._streams.release)
        stream.batches = self._stream(context, request, contents, ranges)
        return flight.GeneratorStream(contents.schema, stream)

    def _ticket(self, descriptor: flight.FlightDescriptor) -> Ticket:
        if descriptor.descriptor_type == flight.DescriptorType.CMD:
            return _as_client_error(lambda: parse_ticket(descriptor.command))
        return _as_client_error(lambda: Ticket(b"/".join(descriptor.path).decode(errors="replace")))

    def _contents(self, ticket: Ticket) -> Contents:
        return _as_client_error(lambda: ticket.contents(self._run, self._tokenizer))

    def _info(self, ticket: Ticket) -> flight.FlightInfo:
        contents, ranges = self._contents(ticket), self._ranges(ticket)
        descriptor = flight.FlightDescriptor.for_command(ticket.encode())
        endpoints = []
        for partition, held in ranges.items():
            until = {} if ticket.follow else {partition: held.end}
            part = replace(ticket, start={partition: held.beginning}, until=until)
            endpoints.append(flight.FlightEndpoint(part.encode(), []))
        return flight.FlightInfo(contents.schema, descriptor, endpoints, -1, -1)

    def _ranges(self, ticket: Ticket) -> dict[int, PartitionRange]:
        """By partition: the offsets to read. Raises UnknownTopic, and ArrowInvalid for an invalid position."""
        name = CATALOGUE[ticket.topic].name(self._run)
        if isinstance(ticket.start, str):
            span = _as_client_error(lambda: parse_span([ticket.start], wall_ms()))  # type: ignore[list-item]
            ranges = resolve_span(self._client, name, span)
        else:
            held = partition_ranges(self._client, name)
            if missing := sorted(ticket.start.keys() - held.keys()):
                raise pa.ArrowInvalid(f"{name} has no partition {missing[0]}")
            for partition, offset in ticket.start.items():
                if 0 < offset < (begin := held[partition].beginning):  # 0 is the beginning
                    raise pa.ArrowInvalid(
                        f"offsets {offset} to {begin - 1} of {name}, partition {partition}, were deleted: begin at "
                        f"{begin}"
                    )
            ranges = {
                partition: PartitionRange(max(offset, held[partition].beginning), held[partition].end)
                for partition, offset in ticket.start.items()
            }
        return {
            partition: PartitionRange(each.beginning, min(each.end, ticket.until.get(partition, each.end)))
            for partition, each in ranges.items()
        }

    def _stream(
        self, context: Any, ticket: Ticket, contents: Contents, ranges: Mapping[int, PartitionRange]
    ) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        if ticket.follow:
            yield from self._follow(context, contents, ranges)
            return
        for partition, held in ranges.items():
            gathered = _PendingRows(contents, partition, held.beginning)
            for record in self._read(contents, partition, held):
                yield from gathered.take(record)
            yield from gathered.batches(held.end)

    def _follow(
        self, context: Any, contents: Contents, ranges: Mapping[int, PartitionRange]
    ) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        gathered = {p: _PendingRows(contents, p, held.beginning) for p, held in ranges.items()}
        start = {p: held.beginning for p, held in ranges.items()}
        for records in follow_topic(self._client, contents.source.name(self._run), start, decode_as_blocks):
            for record in records:
                yield from gathered[record.partition].take(record)
            for each in gathered.values():  # rows are sent without waiting for a full batch
                yield from each.batches()
            if context.is_cancelled() or self._closing.is_set():
                return

    def _read(self, contents: Contents, partition: int, held: PartitionRange) -> Iterator[StoredRecord]:
        name = contents.source.name(self._run)
        return read_partition(self._client, name, partition, held.beginning, held.end, decode_as_blocks)


class _Stream:
    """The batches of one call, and its slot, which is released when they end, fail or are dropped.

    Flight drops a stream unread if its client disconnects before the first batch. A generator that was never started
    does not run its `finally`, so this object releases the slot.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = weakref.finalize(self, release)
        self.batches: Iterator[tuple[pa.RecordBatch, bytes]] = iter(())

    def __iter__(self) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        return self

    def __next__(self) -> tuple[pa.RecordBatch, bytes]:
        try:
            return next(self.batches)
        except BaseException:
            self._release()
            raise


class _PendingRows:
    """The rows of one partition that are not sent yet, from offset `first` on."""

    def __init__(self, contents: Contents, partition: int, first: int) -> None:
        self._contents, self._partition, self._next = contents, partition, first
        self._sent = first
        self._records: list[RecordRows] = []
        self._rows = self._bytes = self._undecodable = 0

    def take(self, record: StoredRecord) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        """Add a record; yields the batches that are due."""
        self._next = record.offset + 1
        if record.error is not None or record.rows[0].kind not in self._contents.source.record_classes:
            self._undecodable += 1
            return
        self._records.append(RecordRows.of_one(record.rows[0], record.offset, record.timestamp))
        self._rows += len(record.rows[0])
        self._bytes += record.size
        if self._rows >= BATCH_ROWS or self._bytes >= BATCH_BYTES:
            yield from self.batches()

    def batches(self, end: int | None = None) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        """All pending rows, as batches; with `end`, all records before offset `end` have been added."""
        self._next = max(self._next, end or 0)
        if self._next == self._sent:
            return
        contents = self._contents
        rows = contents.view_rows(contents.selected_rows(as_table(contents.source, self._partition, self._records)))
        metadata = {"partition": self._partition, "next": self._next, "undecodable": self._undecodable}
        empty = pa.RecordBatch.from_pylist([], schema=rows.schema)
        *before, last = rows.combine_chunks().to_batches(max_chunksize=BATCH_ROWS) or [empty]
        yield from ((batch, b"") for batch in before)
        yield last, json.dumps(metadata).encode()
        self._records, self._sent = [], self._next
        self._rows = self._bytes = self._undecodable = 0


class _TokenFactory(flight.ServerMiddlewareFactory):
    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    def start_call(self, info: Any, headers: Mapping[str, list[Any]]) -> None:
        """Raise FlightUnauthenticatedError unless the call carries the token."""
        header = next((values[0] for name, values in headers.items() if name.lower() == "authorization" and values), "")
        given = header if isinstance(header, bytes) else header.encode()
        if not hmac.compare_digest(given, self._expected):
            raise flight.FlightUnauthenticatedError("this endpoint needs the header authorization: Bearer TOKEN")


def _as_client_error(make: Callable[[], Any]) -> Any:
    """The result of `make`. Its ValueError becomes ArrowInvalid, which Flight reports to the client."""
    try:
        return make()
    except ValueError as error:
        raise pa.ArrowInvalid(str(error)) from error
