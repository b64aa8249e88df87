"""The codec of every record on a topic: value bytes, and headers that identify them.

A reader identifies a record without decoding it: `content-type`, `laminar-schema` ("Trajectory/2") and, if the record
has one, `policy-version` are headers. Bytes that cannot be decoded raise `UndecodableRecord`, which callers turn into a
dead letter. So do records of release 0.1.0: a run of that release is rejected by its notes and its folder, before they
are read, and a single record must not end a run of this one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from schemas import records
from schemas.plain import add_defaults, decode_json, encode_json, remove_fields
from schemas.record_versions import ADDED, INFORMATION, OPTIONAL_ADDED, VERSIONS, version_in
from schemas.release import NEWEST, NotInRelease, OldRelease, written_release

MAX_VALUE_BYTES = 8 * 1024 * 1024
"""The largest value that is written or read. The broker's limit is higher."""

MAX_ROWS = 256
"""The maximum number of rows in one value."""

Headers = tuple[tuple[str, bytes], ...]
Encoding = Literal["arrow", "json"]

_CONTENT_TYPES: Mapping[Encoding, bytes] = {
    "arrow": b"application/vnd.apache.arrow.recordbatch",
    "json": b"application/json",
}


class ValueTooLarge(ValueError):
    """A value is larger than `MAX_VALUE_BYTES`."""


class UndecodableRecord(ValueError):
    """Bytes on a topic that are not a valid record: garbage, an unknown schema or version, or over the size bound."""


@dataclass(frozen=True, slots=True)
class RecordType:
    """The encoding of a record class: its name and version on the wire, and its format."""

    kind: type
    version: int
    encoding: Encoding
    rows: bool
    """Whether one Kafka record may hold several of them as rows."""

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
_SINGLE_ROW = {records.MicroBatch, records.DeadLetter}
_OLD_SCHEMAS = re.compile(rb"[A-Za-z]{1,40}/1|WeightVersion/2")
RECORD_TYPES: tuple[RecordType, ...] = tuple(
    RecordType(kind, VERSIONS.get(kind, 2), "arrow" if kind in _ARROW else "json", rows=kind in _ARROW - _SINGLE_ROW)
    for kind in records.RECORDS
)
_BY_KIND = {entry.kind: entry for entry in RECORD_TYPES}
_BY_SCHEMA = {entry.schema.encode(): entry for entry in RECORD_TYPES}
_EARLIER = {
    f"{kind.__name__}/{2 + at}".encode(): (_BY_KIND[kind], fields[at:])
    for kind, fields in ADDED.items()
    for at in range(len(fields))
}
_EARLIER |= {
    f"{kind.__name__}/{version}".encode(): (_BY_KIND[kind], ())
    for kind, newest in OPTIONAL_ADDED.items()
    for version in range(2, newest)
}
"""Earlier versions that are still read, with the fields that they lack: `identify` adds them, empty."""


def as_version(value: bytes, headers: Headers, version: int) -> tuple[bytes, Headers]:
    """A record of the present version as a release with its `version` wrote it.

    Unchanged if there was no such version, or if a field that it lacked is not empty. Raises ValueError for bytes that
    are not a record of the present version.
    """
    entry = _BY_SCHEMA.get(next((header for name, header in headers if name == "laminar-schema"), b""))
    if entry is None or version < 2:
        return value, headers
    shorter, filled = _without_added(entry, value, version)
    if filled or shorter is value:
        return value, headers
    schema = f"{entry.kind.__name__}/{version}".encode()
    return shorter, tuple((name, schema if name == "laminar-schema" else header) for name, header in headers)


def _without_added(entry: RecordType, value: bytes, version: int) -> tuple[bytes, list[str]]:
    """`value` without the fields that were added after `version`, and those of them that are not empty."""
    fields = ADDED.get(entry.kind, ())[version - 2 :]
    if not fields:
        return value, []
    if entry.encoding == "json":
        return remove_fields(value, fields)
    return _arrow().remove_columns(entry.kind, value, fields)  # type: ignore[no-any-return]


def is_read(kind: type) -> bool:
    """Whether roles of the run's release read records of `kind` on the topics that they read."""
    return version_in(kind, written_release()) is not None


def versions_of(schema: str) -> range:
    """The versions of the record with `schema`, "Trajectory/4", that can be written; empty for an unknown one."""
    entry = _BY_SCHEMA.get(schema.encode())
    return range(0) if entry is None else range(entry.version - len(ADDED.get(entry.kind, ())), entry.version + 1)


def record_type(kind: type) -> RecordType:
    """The encoding of `kind`. Raises KeyError if it is not a record class."""
    return _BY_KIND[kind]


def encode(*rows: Any) -> tuple[bytes, Headers]:
    """Value and headers of `rows`: one record, or several of one Arrow-encoded class with the same key.

    Raises ValueError if the value is larger than `MAX_VALUE_BYTES` or a row does not fit its schema.
    """
    entry = _BY_KIND[type(rows[0])]
    value, headers = with_headers(
        entry, _arrow().encode_arrow(rows) if entry.encoding == "arrow" else encode_json(*rows)
    )
    version = getattr(rows[0], "policy_version", None)
    if version is not None:
        headers += (("policy-version", str(version).encode()),)
    return value, headers


def encode_all(rows: Sequence[Any]) -> Iterator[tuple[bytes, Headers]]:
    """Encode `rows` of one class in as few values as the bounds allow. Raises ValueError if one row is too large."""
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
    entry, value = identify(value, headers)
    try:
        if entry.encoding == "json":
            return [decode_json(entry.kind, value)]
        return _arrow().decode_arrow(entry.kind, value)  # type: ignore[no-any-return]
    except (ValueError, TypeError) as error:
        raise UndecodableRecord(str(error)) from error


def with_headers(entry: RecordType, value: bytes) -> tuple[bytes, Headers]:
    """`value`, of the newest version, as roles of the run's release read it, with the headers that identify it.

    Raises ValueTooLarge, and NotInRelease if they could not read what it needs.
    """
    if len(value) > MAX_VALUE_BYTES:
        raise ValueTooLarge(f"{entry.schema} of {len(value)} bytes is larger than {MAX_VALUE_BYTES}")
    schema = entry.schema
    if (release := written_release()) != NEWEST:
        name = entry.kind.__name__
        if (version := version_in(entry.kind, release)) is None:
            raise NotInRelease(f"record {name}", release)
        value, filled = _without_added(entry, value, version)
        if needed := [field for field in filled if field not in INFORMATION]:
            raise NotInRelease(f"{name}.{needed[0]}", release)
        schema = f"{name}/{min(version, entry.version)}"
    return value, (("content-type", _CONTENT_TYPES[entry.encoding]), ("laminar-schema", schema.encode()))


def reject_old_release(headers: Iterable[tuple[str, bytes]]) -> None:
    """Raise OldRelease if the record with these headers was written by release 0.1.0."""
    for name, schema in headers:
        if name == "laminar-schema" and _OLD_SCHEMAS.fullmatch(schema):
            raise OldRelease(f"a {schema.decode()} record")


def identify(value: bytes | None, headers: Iterable[tuple[str, bytes]]) -> tuple[RecordType, bytes]:
    """The record type of `value` by its headers, and `value` within bounds and of its newest version.

    Raises UndecodableRecord.
    """
    if value is None:
        raise UndecodableRecord("no value (a tombstone)")
    if len(value) > MAX_VALUE_BYTES:
        raise UndecodableRecord(f"{len(value)} bytes are over the limit of {MAX_VALUE_BYTES}")
    headers = tuple(headers)
    schema = next((header for name, header in headers if name == "laminar-schema"), None)
    if schema is None:
        raise UndecodableRecord("no laminar-schema header")
    entry = _BY_SCHEMA.get(schema)
    if entry is None and (earlier := _EARLIER.get(schema)) is not None:
        entry, missing = earlier
        return entry, _upgraded(entry.kind, value, missing) if missing else value
    if entry is None:
        by = ", of release 0.1.0" if _OLD_SCHEMAS.fullmatch(schema) else ""
        raise UndecodableRecord(f"unknown schema {schema[:80]!r}{by}")
    return entry, value


def _upgraded(kind: type, value: bytes, missing: tuple[str, ...]) -> bytes:
    try:
        if _BY_KIND[kind].encoding == "json":
            return add_defaults(kind, value, missing)
        return _arrow().add_empty_columns(kind, value, missing)  # type: ignore[no-any-return]
    except ValueError as error:
        raise UndecodableRecord(str(error)) from error


@cache
def _arrow() -> Any:
    # Imported on first use: importing pyarrow takes longer than most reads of control records, which do not need it.
    from schemas import arrow

    return arrow
