"""Decoding of many Arrow messages of one layout in one pass.

Arrow needs 10 to 20 µs to read a message, whatever its size. Messages with the same metadata have the same buffers at
the same positions, so the messages form a table of bytes, from which the buffers of all are sliced as columns, at a
fraction of a microsecond per message. Messages of other or rare layouts are read one by one.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from schemas.flatbuffer import field_of, table_at

MIN_STACKED = 8
MAX_STACKED_BYTES = 4096
"""Messages of one layout are stacked if there are `MIN_STACKED`, of at most `MAX_STACKED_BYTES`; more gain nothing."""

_PREFIX = 8  # continuation marker and length of the metadata
_OFFSET = struct.calcsize("i")


def read_stacked(
    schema: pa.Schema, values: Sequence[bytes], read: Callable[[bytes], pa.RecordBatch]
) -> tuple[pa.RecordBatch, list[int]]:
    """The rows of one or more `values`, in their order, and the number of rows of each.

    `read` reads one value. Raises what `read` raises for an invalid one, and pa.ArrowInvalid.
    """
    layouts: dict[tuple[bytes, int], list[int]] = {}
    for at, value in enumerate(values):
        end = _PREFIX + int.from_bytes(value[4:_PREFIX], "little")
        layouts.setdefault((value[:end], len(value)), []).append(at)
    batches: list[pa.RecordBatch] = []
    counts, order = [0] * len(values), []
    for (metadata, size), members in layouts.items():
        same = [values[at] for at in members]
        first = read(same[0])
        stacked = (
            _read_stack(schema, metadata, same) if len(same) >= MIN_STACKED and size <= MAX_STACKED_BYTES else None
        )
        found = [first, *map(read, same[1:])] if stacked is None else [stacked]
        for number, at in enumerate(members):
            counts[at] = found[number].num_rows if stacked is None else first.num_rows
        batches += found
        order += members
    rows = pa.concat_batches(batches)
    return (rows if len(layouts) == 1 else rows.take(_row_indices(order, counts))), counts


def _row_indices(order: Sequence[int], counts: Sequence[int]) -> pa.Array:
    """The index of each row, message by message, if the messages are stored in `order`."""
    starts, at = [0] * len(order), 0
    for message in order:
        starts[message] = at
        at += counts[message]
    return pa.array([row for start, count in zip(starts, counts, strict=True) for row in range(start, start + count)])


def _read_stack(schema: pa.Schema, metadata: bytes, messages: Sequence[bytes]) -> pa.RecordBatch | None:
    """The rows of `messages`, which all have `metadata` and of which the first is valid; None if layouts differ."""
    try:
        stack = _StackedMessages(metadata, messages)
        batch = pa.RecordBatch.from_arrays([stack.array(field.type) for field in schema], schema=schema)
    except _LayoutsDiffer:
        return None
    batch.validate(full=True)
    return batch


class _LayoutsDiffer(Exception):
    """Lists or strings of the messages have different offsets, or different values are null."""


class _StackedMessages:
    """Messages with the same metadata as a table of bytes, and their arrays as columns sliced from it, in order.

    In the metadata a node is the length and null count of an array, a buffer is a position in the body (Arrow format).
    """

    def __init__(self, metadata: bytes, messages: Sequence[bytes]) -> None:
        batch = table_at(metadata, field_of(metadata, table_at(metadata, _PREFIX), 2))
        self._nodes = _pairs(metadata, field_of(metadata, batch, 1))
        self._buffers = _pairs(metadata, field_of(metadata, batch, 2))
        self._body, self._count, width = len(metadata), len(messages), len(messages[0])
        data = pa.py_buffer(b"".join(messages))
        self._table = pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), self._count, [None, data])
        bits = pa.BooleanArray.from_buffers(pa.bool_(), 8 * width * self._count, [None, data])
        self._bits = pa.FixedSizeListArray.from_arrays(bits, 8 * width)

    def array(self, kind: pa.DataType) -> pa.Array:
        """The next array, of type `kind`, of all messages concatenated. Raises _LayoutsDiffer."""
        length, nulls = next(self._nodes)
        position = self._next_position()
        buffers, children = [self._cut_validity(position, length) if nulls else None], []
        if pa.types.is_struct(kind):
            children = [self.array(field.type) for field in kind]
        elif pa.types.is_list(kind) or pa.types.is_map(kind):
            offsets, items = self._cut_offsets(length)
            buffers.append(offsets)
            item = pa.struct([kind.key_field, kind.item_field]) if pa.types.is_map(kind) else kind.value_type
            children = [self.array(item)]
            if len(children[0]) != items * self._count:
                raise _LayoutsDiffer
        elif pa.types.is_string(kind) or pa.types.is_binary(kind):
            offsets, size = self._cut_offsets(length)
            buffers += [offsets, self._cut(self._next_position(), size)]
        elif pa.types.is_boolean(kind):
            buffers.append(self._cut_bits(self._next_position(), length))
        else:
            buffers.append(self._cut(self._next_position(), length * kind.bit_width // 8))
        stacked = pa.Array.from_buffers(kind, length * self._count, buffers, children=children)
        if stacked.null_count != nulls * self._count:
            raise _LayoutsDiffer
        return stacked

    def _next_position(self) -> int:
        return self._body + next(self._buffers)[0]

    def _cut(self, position: int, size: int) -> pa.Buffer:
        """The `size` bytes at `position` of each message."""
        return pc.binary_slice(self._table, position, position + size).buffers()[1]

    def _cut_bits(self, position: int, count: int) -> pa.Buffer:
        """The `count` bits at `position` of each message."""
        cut = pc.list_slice(self._bits, 8 * position, 8 * position + count, return_fixed_size_list=True)
        return cut.flatten().buffers()[1]

    def _shared(self, position: int, size: int) -> bytes:
        """The `size` bytes at `position`, equal in all messages. Raises _LayoutsDiffer."""
        found: bytes = self._cut(position, size).to_pybytes()
        if found != found[:size] * self._count:
            raise _LayoutsDiffer
        return found[:size]

    def _cut_validity(self, position: int, length: int) -> pa.Buffer:
        self._shared(position, -(-length // 8))
        return self._cut_bits(position, length)

    def _cut_offsets(self, length: int) -> tuple[pa.Buffer, int]:
        """The next offsets, for arrays of `length` each, and the end offset of one message. Raises _LayoutsDiffer."""
        offsets = array(
            "i", self._shared(self._next_position(), (length + 1) * _OFFSET if length else 0) or bytes(_OFFSET)
        )
        end = offsets.pop()
        if length and offsets[0]:
            raise _LayoutsDiffer
        shifted = [message * end + offset for message in range(self._count) for offset in offsets]
        return pa.py_buffer(array("i", [*shifted, end * self._count])), end


def _pairs(metadata: bytes, position: int) -> Iterator[tuple[int, int]]:
    """The pairs of a vector of structs of two int64."""
    start = table_at(metadata, position)
    (count,) = struct.unpack_from("<I", metadata, start)
    return struct.iter_unpack("<qq", metadata[start + 4 : start + 4 + 16 * count])
