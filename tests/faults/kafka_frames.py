"""The framing of Kafka's protocol: the parts of a request that a proxy must parse to apply faults.

Source: https://kafka.apache.org/protocol, "Request Header v1/v2" and the requests that name a transactional id.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum


class Api(IntEnum):
    """API keys that faults select or counts name; other requests are shown by number."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    OFFSET_FETCH = 9
    FIND_COORDINATOR = 10
    API_VERSIONS = 18
    INIT_PRODUCER_ID = 22
    ADD_PARTITIONS_TO_TXN = 24
    ADD_OFFSETS_TO_TXN = 25
    END_TXN = 26
    TXN_OFFSET_COMMIT = 28


TRANSACTIONAL = (
    Api.INIT_PRODUCER_ID,
    Api.ADD_PARTITIONS_TO_TXN,
    Api.PRODUCE,
    Api.ADD_OFFSETS_TO_TXN,
    Api.TXN_OFFSET_COMMIT,
    Api.END_TXN,
)
"""The requests that begin with a transactional id, in the order of a transaction."""

_FLEXIBLE_FROM = {
    Api.PRODUCE: 9,
    Api.INIT_PRODUCER_ID: 2,
    Api.ADD_PARTITIONS_TO_TXN: 3,
    Api.ADD_OFFSETS_TO_TXN: 3,
    Api.END_TXN: 3,
    Api.TXN_OFFSET_COMMIT: 3,
}
"""The first version of each with compact strings and tagged fields (header v2)."""


@dataclass(frozen=True, slots=True)
class Request:
    """A received request: `frame` is the whole frame, length prefix included."""

    api: int
    version: int
    correlation: int
    transactional_id: str | None
    frame: bytes

    @property
    def kind(self) -> str:
        """The name of its API; one without a name here has its number."""
        return Api(self.api).name if self.api in Api._value2member_map_ else f"api {self.api}"

    def __str__(self) -> str:
        return f"{self.kind} v{self.version}" + (f" of {self.transactional_id}" if self.transactional_id else "")


def parse_request(frame: bytes) -> Request:
    """Read the header of `frame`, and the transactional id that the six requests of transactions begin with."""
    api, version, correlation = struct.unpack_from(">hhi", frame, 4)
    transactional_id: str | None = None
    if api in _FLEXIBLE_FROM:
        (length,) = struct.unpack_from(">h", frame, 12)
        at = 14 + max(length, 0)
        if version >= _FLEXIBLE_FROM[Api(api)]:
            at = _skip_tagged_fields(frame, at)
            size, at = _unsigned_varint(frame, at)
            size -= 1
        else:
            (size,) = struct.unpack_from(">h", frame, at)
            at += 2
        transactional_id = frame[at : at + size].decode() if size >= 0 else None
    return Request(api, version, correlation, transactional_id, frame)


def correlation_of(response: bytes) -> int:
    """The correlation id of a response."""
    return int(struct.unpack_from(">i", response, 4)[0])


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The next request or response, length prefix included. Raises IncompleteReadError at the end of the stream."""
    prefix = await reader.readexactly(4)
    return prefix + await reader.readexactly(struct.unpack(">i", prefix)[0])


def error_code_of(request: Request, response: bytes) -> int | None:
    """The first error code in the response to one of `TRANSACTIONAL`, 0 if it has none; None for other requests."""
    if request.api not in TRANSACTIONAL:
        return None
    flexible = request.version >= _FLEXIBLE_FROM[Api(request.api)]
    fields = _Fields(response, 8, flexible)
    fields.skip_tags()  # of the header
    if request.api == Api.PRODUCE:
        return _first_error(fields, lambda: _skip_produced(fields, request.version))
    fields.skip(4)  # throttle_time_ms
    if request.api in (Api.ADD_PARTITIONS_TO_TXN, Api.TXN_OFFSET_COMMIT):
        return _first_error(fields, lambda: None)
    return fields.int16()


def _first_error(fields: _Fields, skip_rest: Callable[[], None]) -> int:
    """The first error of a list of topics with a list of partitions: number, error code, and what `skip_rest` reads."""
    codes = []
    for _ in range(fields.length(4)):
        fields.skip(fields.length(2))  # the topic's name
        for _ in range(fields.length(4)):
            fields.skip(4)
            codes.append(fields.int16())
            skip_rest()
            fields.skip_tags()
        fields.skip_tags()
    return next((code for code in codes if code), 0)


def _skip_produced(fields: _Fields, version: int) -> None:
    """Read what follows the error code of a partition in the response to Produce."""
    fields.skip(8 + (8 if version >= 2 else 0) + (8 if version >= 5 else 0))  # offset, time, first offset of the log
    if version >= 8:
        for _ in range(fields.length(4)):  # errors of records
            fields.skip(4)
            fields.skip(fields.length(2))
            fields.skip_tags()
        fields.skip(fields.length(2))  # error message


class _Fields:
    """The fields of a message from byte `at` on; `flexible`: with compact lengths and tagged fields."""

    def __init__(self, data: bytes, at: int, flexible: bool) -> None:
        self._data, self._at, self._flexible = data, at, flexible

    def int16(self) -> int:
        """The next 16-bit number."""
        self._at += 2
        return int(struct.unpack_from(">h", self._data, self._at - 2)[0])

    def length(self, size: int) -> int:
        """The next length, of `size` bytes unless compact; 0 for null."""
        if self._flexible:
            length, self._at = _unsigned_varint(self._data, self._at)
            return max(0, length - 1)
        self._at += size
        return max(0, int.from_bytes(self._data[self._at - size : self._at], signed=True))

    def skip(self, count: int) -> None:
        """Skip `count` bytes."""
        self._at += count

    def skip_tags(self) -> None:
        """Skip tagged fields."""
        if self._flexible:
            self._at = _skip_tagged_fields(self._data, self._at)


def _unsigned_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, at


def _skip_tagged_fields(data: bytes, at: int) -> int:
    count, at = _unsigned_varint(data, at)
    for _ in range(count):
        _, at = _unsigned_varint(data, at)
        size, at = _unsigned_varint(data, at)
        at += size
    return at
