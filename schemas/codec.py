"""One way in and one way out for every record on a topic: value bytes plus the headers that say what they are.

A reader needs no decoding to know what it looks at: `content-type`, `laminar-schema` ("Trajectory/2") and, where there
is one, `policy-version` are headers. Whatever cannot be decoded raises `UndecodableRecord`, which callers turn into a
dead letter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from schemas import records
from schemas.plain import decode_json, encode_json

MAX_VALUE_BYTES = 8 * 1024 * 1024
"""The largest value that is written or read. The broker's own bound lies above it."""

MAX_ROWS = 256
"""The most rows in one value."""

Headers = tuple[tuple[str, bytes], ...]
Encoding = Literal["arrow", "json"]

_CONTENT_TYPES: Mapping[Encoding, bytes] = {
    "arrow": b"application/vnd.apache.arrow.recordbatch",
    "json": b"application/json",
}


class ValueTooLarge(ValueError):
    """A value beyond `MAX_VALUE_BYTES`."""


class UndecodableRecord(ValueError):
    """Bytes on a topic that are no record of ours: garbage, an unknown schema or version, or beyond the size bound."""


class RecordOfFirstRelease(UndecodableRecord):
    """A record that release 0.1.0 wrote. Later releases have other records and cannot work on its runs."""


@dataclass(frozen=True, slots=True)
class RecordType:
    """How a record class travels: its name and version on the wire, and its encoding."""

    kind: type
    version: int
    encoding: Encoding
    rows: bool
    """Whether several of them may travel as rows of one record."""

    @property
    def schema(self) -> str:
        return f"{self.kind.__name__}/{self.version}"


_ARROW = {
    records.Prompt,
    records.Assignment,
    records.Progress,
    records.Trajectory,
    records.Experience,
    records.Settled,
    records.MicroBatch,
    records.DeadLetter,
}
_APART = {records.MicroBatch, records.DeadLetter}
_VERSIONS: Mapping[type, int] = {records.WeightVersion: 3}
"""Schema versions; 2 for all other records."""
_OF_FIRST_RELEASE = re.compile(rb"[A-Za-z]{1,40}/1|WeightVersion/2")
RECORD_TYPES: tuple[RecordType, ...] = tuple(
    RecordType(kind, _VERSIONS.get(kind, 2), "arrow" if kind in _ARROW else "json", rows=kind in _ARROW - _APART)
    for kind in records.RECORDS
)
_BY_KIND = {entry.kind: entry for entry in RECORD_TYPES}
_BY_SCHEMA = {entry.schema.encode(): entry for entry in RECORD_TYPES}


def record_type(kind: type) -> RecordType:
    """How `kind` travels. Raises KeyError for a class that does not."""
    return _BY_KIND[kind]


def encode(*rows: Any) -> tuple[bytes, Headers]:
    """Value and headers of `rows`: one record, or several of one Arrow-encoded class that share a key.

    Raises ValueError if the value is larger than `MAX_VALUE_BYTES` or a row does not fit its schema.
    """
    entry = _BY_KIND[type(rows[0])]
    value, headers = within_bounds(
        entry, _arrow().encode_arrow(rows) if entry.encoding == "arrow" else encode_json(*rows)
    )
    version = getattr(rows[0], "policy_version", None)
    if version is not None:
        headers += (("policy-version", str(version).encode()),)
    return value, headers


def encode_all(rows: Sequence[Any]) -> Iterator[tuple[bytes, Headers]]:
    """`rows` of one class in as few values as the bounds allow. Raises ValueError for a row that alone is too large."""
    for first in range(0, len(rows), MAX_ROWS):
        part = rows[first : first + MAX_ROWS]
        try:
            yield encode(*part)
        except ValueTooLarge:
            if len(part) == 1:
                raise
            yield from encode_all(part[: len(part) // 2])
            yield from encode_all(part[len(part) // 2 :])


def decode(value: bytes | None, headers: Iterable[tuple[str, bytes]]) -> list[Any]:
    """The records in `value`, at least one. Raises UndecodableRecord."""
    entry, value = typed(value, headers)
    try:
        if entry.encoding == "json":
            return [decode_json(entry.kind, value)]
        return _arrow().decode_arrow(entry.kind, value)  # type: ignore[no-any-return]
    except (ValueError, TypeError) as error:
        raise UndecodableRecord(str(error)) from error


def within_bounds(entry: RecordType, value: bytes) -> tuple[bytes, Headers]:
    """`value` with the headers that say what it is. Raises ValueTooLarge."""
    if len(value) > MAX_VALUE_BYTES:
        raise ValueTooLarge(f"{entry.schema} of {len(value)} bytes is larger than {MAX_VALUE_BYTES}")
    return value, (("content-type", _CONTENT_TYPES[entry.encoding]), ("laminar-schema", entry.schema.encode()))


def typed(value: bytes | None, headers: Iterable[tuple[str, bytes]]) -> tuple[RecordType, bytes]:
    """What `value` says it is, and itself, within bounds. Raises UndecodableRecord."""
    if value is None:
        raise UndecodableRecord("no value (a tombstone)")
    if len(value) > MAX_VALUE_BYTES:
        raise UndecodableRecord(f"{len(value)} bytes are more than the bound of {MAX_VALUE_BYTES}")
    schema = next((header for name, header in headers if name == "laminar-schema"), None)
    if schema is None:
        raise UndecodableRecord("no laminar-schema header")
    entry = _BY_SCHEMA.get(schema)
    if entry is None and _OF_FIRST_RELEASE.fullmatch(schema):
        raise RecordOfFirstRelease(f"{schema.decode()} was written by release 0.1.0; only that release reads this run")
    if entry is None:
        raise UndecodableRecord(f"unknown schema {schema[:80]!r}")
    return entry, value


@cache
def _arrow() -> Any:
    # pyarrow takes longer to import than most looks into a topic, and whoever sees control records alone needs none.
    from schemas import arrow

    return arrow
