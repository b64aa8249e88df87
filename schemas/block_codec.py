"""Like `codec`, for many rows as columns: no record objects are built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from schemas.arrow import decode_columns, decode_many
from schemas.block import Block
from schemas.codec import (
    MAX_ROWS,
    MAX_VALUE_BYTES,
    Headers,
    RecordType,
    UndecodableRecord,
    ValueTooLarge,
    identify,
    record_type,
    with_headers,
)
from schemas.plain import decode_json


def encode_block(block: Block) -> Iterator[tuple[bytes, Headers]]:
    """Encode `block`, of an Arrow-encoded class, in as few values as the bounds allow. Raises ValueError."""
    entry = record_type(block.kind)
    for first in range(0, len(block), MAX_ROWS):
        part = block.slice(first, MAX_ROWS)
        try:
            yield with_headers(entry, part.batch.serialize().to_pybytes())
        except ValueTooLarge:
            half = len(part) // 2
            if not half:
                raise
            yield from encode_block(part.slice(0, half))
            yield from encode_block(part.slice(half, len(part) - half))


def decode_as_block(value: bytes | None, headers: Iterable[tuple[str, bytes]]) -> Block:
    """Like `decode_block`, also for JSON-encoded classes. Raises UndecodableRecord."""
    return _as_block(*identify(value, headers))


def decode_as_blocks(value: bytes | None, headers: Iterable[tuple[str, bytes]]) -> tuple[Block]:
    """`decode_as_block` as a decoder of `read_topic`, whose records then have one block each."""
    return (decode_as_block(value, headers),)


def decode_block(value: bytes | None, headers: Iterable[tuple[str, bytes]]) -> Block:
    """The records in `value`, at least one, of an Arrow-encoded class, as columns. Raises UndecodableRecord."""
    entry, value = identify(value, headers)
    if entry.encoding != "arrow":
        raise UndecodableRecord(f"{entry.schema} is JSON and cannot be read as columns")
    return _as_block(entry, value)


def _as_block(entry: RecordType, value: bytes) -> Block:
    try:
        if entry.encoding == "arrow":
            return Block(entry.kind, decode_columns(entry.kind, value))
        return Block.of([decode_json(entry.kind, value)])
    except (ValueError, TypeError) as error:
        raise UndecodableRecord(str(error)) from error


@dataclass(frozen=True, slots=True)
class Decoded:
    """The contents of many values: `blocks` has all rows of each class, in the order of the values.

    `contents` has for each value its class and number of rows, or the reason why it could not be decoded.
    """

    blocks: Mapping[type, Block]
    contents: Sequence[tuple[type, int] | str]

    def per_value(self) -> list[Block | str]:
        """The rows of each value, or the reason why it could not be decoded."""
        taken: Counter[type] = Counter()
        found: list[Block | str] = []
        for each in self.contents:
            if isinstance(each, str):
                found.append(each)
            else:
                kind, rows = each
                found.append(self.blocks[kind].slice(taken[kind], rows))
                taken[kind] += rows
        return found


def decode_all(values: Sequence[bytes | None], headers: Sequence[Headers]) -> Decoded:
    """Decode each value as `decode_as_block` does; many small records together cost a fraction."""
    contents: list[tuple[type, int] | str] = [""] * len(values)
    kinds: dict[RecordType, list[int]] = {}
    last, indices = None, []
    newest = list(values)
    for at, (value, header) in enumerate(zip(values, headers, strict=True)):
        if header is not last or value is None or len(value) > MAX_VALUE_BYTES:  # equal headers mostly come in runs
            try:
                entry, newest[at] = identify(value, header)
            except UndecodableRecord as error:
                contents[at] = str(error)
                continue
            indices = kinds.setdefault(entry, [])
            last = header if newest[at] is value else None  # each value of an earlier version is converted
        indices.append(at)
    blocks = {}
    for entry, indices in kinds.items():
        same = [newest[at] or b"" for at in indices]
        try:
            blocks[entry.kind], counts = _together(entry, same)
        except (ValueError, TypeError):  # at least one of them is invalid
            found, counts = _one_by_one(entry, same)
            blocks |= {entry.kind: Block.concat(found)} if found else {}
        for at, count in zip(indices, counts, strict=True):
            contents[at] = count if isinstance(count, str) else (entry.kind, count)
    return Decoded(blocks, contents)


def _together(entry: RecordType, values: Sequence[bytes]) -> tuple[Block, list[int | str]]:
    if entry.encoding == "json":
        return Block.of([decode_json(entry.kind, value) for value in values]), [1] * len(values)
    batch, counts = decode_many(entry.kind, values)
    return Block(entry.kind, batch), [*counts]


def _one_by_one(entry: RecordType, values: Sequence[bytes]) -> tuple[list[Block], list[int | str]]:
    """The rows of the values that can be decoded, and for each value its number of rows or the reason."""
    blocks: list[Block] = []
    counts: list[int | str] = []
    for value in values:
        try:
            blocks.append(_as_block(entry, value))
            counts.append(len(blocks[-1]))
        except UndecodableRecord as error:
            counts.append(str(error))
    return blocks, counts
