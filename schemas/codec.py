"""One way in and one way out for every record on a topic: value bytes plus the headers that say what they are.

A reader needs no decoding to know what it looks at: `content-type`, `laminar-schema` ("Trajectory/1") and, where there
is one, `policy-version` are headers. Whatever cannot be decoded raises `UndecodableRecord`, which callers turn into a
dead letter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from schemas import records
from schemas.arrow import decode_arrow, decode_columns, decode_many, encode_arrow
from schemas.block import Block
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
_ENCODE: Mapping[Encoding, Callable[[Sequence[Any]], bytes]] = {
    "arrow": encode_arrow,
    "json": lambda rows: encode_json(*rows),
}
_DECODE: Mapping[Encoding, Callable[[type, bytes], list[Any]]] = {
    "arrow": decode_arrow,
    "json": lambda kind, data: [decode_json(kind, data)],
}


class ValueTooLarge(ValueError):
    """A value beyond `MAX_VALUE_BYTES`."""


class UndecodableRecord(ValueError):
    """Bytes on a topic that are no record of ours: garbage, an unknown schema or version, or beyond the size bound."""


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
RECORD_TYPES: tuple[RecordType, ...] = tuple(
    RecordType(kind, 1, "arrow" if kind in _ARROW else "json", rows=kind in _ARROW - _APART) for kind in records.RECORDS
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
    value, headers = _within_bounds(entry, _ENCODE[entry.encoding](rows))
    version = getattr(rows[0], "policy_version", None)
    if version is not None:
        headers += (("policy-version", str(version).encode()),)
    return value, headers


def encode_block(block: Block) -> Iterator[tuple[bytes, Headers]]:
    """`block`, of an Arrow-encoded class, in as few values as the bounds allow. Raises ValueError as `encode_all`."""
    entry = _BY_KIND[block.kind]
    for first in range(0, len(block), MAX_ROWS):
        part = block.part(first, MAX_ROWS)
        try:
            yield _within_bounds(entry, part.batch.serialize().to_pybytes())
        except ValueTooLarge:
            half = len(part) // 2
            if not half:
                raise
            yield from encode_block(part.part(0, half))
            yield from encode_block(part.part(half, len(part) - half))


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
    entry, value = _typed(value, headers)
    try:
        return _DECODE[entry.encoding](entry.kind, value)
    except (ValueError, TypeError) as error:
        raise UndecodableRecord(str(error)) from error


def decode_as_block(value: bytes | None, headers: Iterable[tuple[str, bytes]]) -> Block:
    """As `decode_block`, and of JSON-encoded classes as well, one by one. Raises UndecodableRecord."""
    return _as_block(*_typed(value, headers))


def _as_block(entry: RecordType, value: bytes) -> Block:
    try:
        if entry.encoding == "arrow":
            return Block(entry.kind, decode_columns(entry.kind, value))
        return Block.of([decode_json(entry.kind, value)])
    except (ValueError, TypeError) as error:
        raise UndecodableRecord(str(error)) from error


@dataclass(frozen=True, slots=True)
class Decoded:
    """What many values hold: of each class all rows, in the order of the values, and what is each value's.

    That is its class and how many rows, or the reason why it holds none.
    """

    blocks: Mapping[type, Block]
    held: Sequence[tuple[type, int] | str]

    def apart(self) -> list[Block | str]:
        """The rows of each value by themselves, or the reason."""
        taken: Counter[type] = Counter()
        found: list[Block | str] = []
        for each in self.held:
            if isinstance(each, str):
                found.append(each)
            else:
                kind, rows = each
                found.append(self.blocks[kind].part(taken[kind], rows))
                taken[kind] += rows
        return found


def decode_all(values: Sequence[bytes | None], headers: Sequence[Headers]) -> Decoded:
    """What `decode_as_block` returns for each value and headers, or raises; small records cost a fraction so."""
    held: list[tuple[type, int] | str] = [""] * len(values)
    kinds: dict[RecordType, list[int]] = {}
    last, places = None, []
    for at, (value, told) in enumerate(zip(values, headers, strict=True)):
        if told is not last or value is None or len(value) > MAX_VALUE_BYTES:  # most come one after the other
            try:
                places = kinds.setdefault(_typed(value, told)[0], [])
            except UndecodableRecord as error:
                held[at] = str(error)
                continue
            last = told
        places.append(at)
    blocks = {}
    for entry, places in kinds.items():
        same = [values[at] or b"" for at in places]
        try:
            blocks[entry.kind], counts = _TOGETHER[entry.encoding](entry.kind, same)
        except (ValueError, TypeError):  # of one of them at least
            found, counts = _one_by_one(entry, same)
            blocks |= {entry.kind: Block.concatenated(found)} if found else {}
        for at, count in zip(places, counts, strict=True):
            held[at] = count if isinstance(count, str) else (entry.kind, count)
    return Decoded(blocks, held)


def _columns_together(kind: type, values: Sequence[bytes]) -> tuple[Block, list[int | str]]:
    batch, counts = decode_many(kind, values)
    return Block(kind, batch), [*counts]


def _objects_together(kind: type, values: Sequence[bytes]) -> tuple[Block, list[int | str]]:
    return Block.of([decode_json(kind, value) for value in values]), [1] * len(values)


_TOGETHER = {"arrow": _columns_together, "json": _objects_together}


def _one_by_one(entry: RecordType, values: Sequence[bytes]) -> tuple[list[Block], list[int | str]]:
    """The rows of those that can be decoded, and of each how many it has, or why none."""
    blocks: list[Block] = []
    counts: list[int | str] = []
    for value in values:
        try:
            blocks.append(_as_block(entry, value))
            counts.append(len(blocks[-1]))
        except UndecodableRecord as error:
            counts.append(str(error))
    return blocks, counts


def decode_block(value: bytes | None, headers: Iterable[tuple[str, bytes]]) -> Block:
    """The records in `value`, at least one, as columns; of an Arrow-encoded class. Raises UndecodableRecord."""
    entry, value = _typed(value, headers)
    if entry.encoding != "arrow":
        raise UndecodableRecord(f"{entry.schema} does not travel as columns")
    return _as_block(entry, value)


def _within_bounds(entry: RecordType, value: bytes) -> tuple[bytes, Headers]:
    if len(value) > MAX_VALUE_BYTES:
        raise ValueTooLarge(f"{entry.schema} of {len(value)} bytes is larger than {MAX_VALUE_BYTES}")
    return value, (("content-type", _CONTENT_TYPES[entry.encoding]), ("laminar-schema", entry.schema.encode()))


def _typed(value: bytes | None, headers: Iterable[tuple[str, bytes]]) -> tuple[RecordType, bytes]:
    """What `value` says it is, and itself, within bounds. Raises UndecodableRecord."""
    if value is None:
        raise UndecodableRecord("no value (a tombstone)")
    if len(value) > MAX_VALUE_BYTES:
        raise UndecodableRecord(f"{len(value)} bytes are more than the bound of {MAX_VALUE_BYTES}")
    schema = next((header for name, header in headers if name == "laminar-schema"), None)
    if schema is None:
        raise UndecodableRecord("no laminar-schema header")
    entry = _BY_SCHEMA.get(schema)
    if entry is None:
        raise UndecodableRecord(f"unknown schema {schema[:80]!r}")
    return entry, value
