"""Values as columns: what `codec` says of one record said of many rows, which are never built one by one."""

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
    record_type,
    typed,
    within_bounds,
)
from schemas.plain import decode_json


def encode_block(block: Block) -> Iterator[tuple[bytes, Headers]]:
    """`block`, of an Arrow-encoded class, in as few values as the bounds allow. Raises ValueError as `encode_all`."""
    entry = record_type(block.kind)
    for first in range(0, len(block), MAX_ROWS):
        part = block.part(first, MAX_ROWS)
        try:
            yield within_bounds(entry, part.batch.serialize().to_pybytes())
        except ValueTooLarge:
            half = len(part) // 2
            if not half:
                raise
            yield from encode_block(part.part(0, half))
            yield from encode_block(part.part(half, len(part) - half))


def decode_as_block(value: bytes | None, headers: Iterable[tuple[str, bytes]]) -> Block:
    """As `decode_block`, and of JSON-encoded classes as well, one by one. Raises UndecodableRecord."""
    return _as_block(*typed(value, headers))


def decode_block(value: bytes | None, headers: Iterable[tuple[str, bytes]]) -> Block:
    """The records in `value`, at least one, as columns; of an Arrow-encoded class. Raises UndecodableRecord."""
    entry, value = typed(value, headers)
    if entry.encoding != "arrow":
        raise UndecodableRecord(f"{entry.schema} does not travel as columns")
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
                places = kinds.setdefault(typed(value, told)[0], [])
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
