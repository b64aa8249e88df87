"""Arrow messages of one layout read as one, for what they cost together rather than each.

Reading a message takes Arrow 10 to 20 µs, whatever is in it. Messages with the same metadata have the same buffers at
the same places, so that the buffers of many are columns of one table of bytes, cut out of it at a fraction of a
microsecond a message. What is not so, or too seldom, is read by itself.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from schemas.flatbuffer import field_of, table_at

FEWEST = 8
LARGEST = 4096
"""So many messages of one layout, none of more bytes, are read as one; of larger ones it is the bytes that cost."""

_PREFIX = 8  # a mark, and the length of the metadata
_OFFSET = struct.calcsize("i")


def read_stacked(
    schema: pa.Schema, values: Sequence[bytes], read: Callable[[bytes], pa.RecordBatch]
) -> tuple[pa.RecordBatch, list[int]]:
    """The rows of all of `values`, one or more, in their order, and how many each has.

    `read` reads one and raises where it is not valid; that is raised, and pa.ArrowInvalid.
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
        stacked = _stacked(schema, metadata, same) if len(same) >= FEWEST and size <= LARGEST else None
        found = [first, *map(read, same[1:])] if stacked is None else [stacked]
        for number, at in enumerate(members):
            counts[at] = found[number].num_rows if stacked is None else first.num_rows
        batches += found
        order += members
    rows = pa.concat_batches(batches)
    return (rows if len(layouts) == 1 else rows.take(_places(order, counts))), counts


def _places(order: Sequence[int], counts: Sequence[int]) -> pa.Array:
    """Where the rows of each message stand, message by message, if the messages lie in `order`."""
    starts, at = [0] * len(order), 0
    for message in order:
        starts[message] = at
        at += counts[message]
    return pa.array([row for start, count in zip(starts, counts, strict=True) for row in range(start, start + count)])


def _stacked(schema: pa.Schema, metadata: bytes, messages: Sequence[bytes]) -> pa.RecordBatch | None:
    """The rows of `messages`, which all have `metadata`, of which one has been found valid; None if they differ."""
    try:
        cut = _Cut(metadata, messages)
        made = pa.RecordBatch.from_arrays([cut.array(field.type) for field in schema], schema=schema)
    except _Differ:
        return None
    made.validate(full=True)
    return made


class _Differ(Exception):
    """Lists or strings of messages do not begin and end at the same places, or other values are null."""


class _Cut:
    """Messages with the same metadata as a table of bytes, and their arrays as columns cut out of it, in their order.

    A node of the metadata is an array's length and its nulls, a buffer a place in the body, as Arrow's format has them.
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
        """The next array, which is of type `kind`, of all messages, one after the other. Raises _Differ."""
        length, nulls = next(self._nodes)
        place = self._next_place()
        buffers, children = [self._cut_validity(place, length) if nulls else None], []
        if pa.types.is_struct(kind):
            children = [self.array(field.type) for field in kind]
        elif pa.types.is_list(kind) or pa.types.is_map(kind):
            offsets, items = self._cut_offsets(length)
            buffers.append(offsets)
            children = [self.array(_item(kind))]
            if len(children[0]) != items * self._count:
                raise _Differ
        elif pa.types.is_string(kind) or pa.types.is_binary(kind):
            offsets, size = self._cut_offsets(length)
            buffers += [offsets, self._cut(self._next_place(), size)]
        elif pa.types.is_boolean(kind):
            buffers.append(self._cut_bits(self._next_place(), length))
        else:
            buffers.append(self._cut(self._next_place(), length * kind.bit_width // 8))
        made = pa.Array.from_buffers(kind, length * self._count, buffers, children=children)
        if made.null_count != nulls * self._count:
            raise _Differ
        return made

    def _next_place(self) -> int:
        return self._body + next(self._buffers)[0]

    def _cut(self, place: int, size: int) -> pa.Buffer:
        """The `size` bytes at `place` of each message."""
        return pc.binary_slice(self._table, place, place + size).buffers()[1]

    def _cut_bits(self, place: int, count: int) -> pa.Buffer:
        """The `count` bits at `place` of each message."""
        cut = pc.list_slice(self._bits, 8 * place, 8 * place + count, return_fixed_size_list=True)
        return cut.flatten().buffers()[1]

    def _shared(self, place: int, size: int) -> bytes:
        """The `size` bytes at `place` of each message, which are the same in all. Raises _Differ."""
        all_of_them: bytes = self._cut(place, size).to_pybytes()
        if all_of_them != all_of_them[:size] * self._count:
            raise _Differ
        return all_of_them[:size]

    def _cut_validity(self, place: int, length: int) -> pa.Buffer:
        self._shared(place, -(-length // 8))
        return self._cut_bits(place, length)

    def _cut_offsets(self, length: int) -> tuple[pa.Buffer, int]:
        """The next offsets, of arrays of `length` each, and where those of one message end. Raises _Differ."""
        offsets = array(
            "i", self._shared(self._next_place(), (length + 1) * _OFFSET if length else 0) or bytes(_OFFSET)
        )
        end = offsets.pop()
        if length and offsets[0]:
            raise _Differ
        shifted = [message * end + offset for message in range(self._count) for offset in offsets]
        return pa.py_buffer(array("i", [*shifted, end * self._count])), end


def _item(kind: pa.DataType) -> pa.DataType:
    """The type of what lists, or maps, of type `kind` hold."""
    return pa.struct([kind.key_field, kind.item_field]) if pa.types.is_map(kind) else kind.value_type


def _pairs(metadata: bytes, place: int) -> Iterator[tuple[int, int]]:
    """A vector of structs of two int64."""
    start = table_at(metadata, place)
    (count,) = struct.unpack_from("<I", metadata, start)
    return struct.iter_unpack("<qq", metadata[start + 4 : start + 4 + 16 * count])
