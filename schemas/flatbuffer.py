"""A few looks into flatbuffers, in which Arrow writes the metadata of its messages."""

from __future__ import annotations

import struct

import pyarrow as pa


def table_at(data: bytes | pa.Buffer, place: int) -> int:
    """Where what the reference at `place` refers to stands. Raises struct.error beyond the data."""
    return place + int(struct.unpack_from("<I", data, place)[0])


def field_of(data: bytes | pa.Buffer, table: int, number: int) -> int:
    """Where field `number` of a table stands, by the table's vtable; 0 where it is absent. Raises struct.error."""
    (back,) = struct.unpack_from("<i", data, table)
    (size,) = struct.unpack_from("<H", data, table - back)
    entry = 4 + 2 * number
    offset = int(struct.unpack_from("<H", data, table - back + entry)[0]) if entry < size else 0
    return table + offset if offset else 0
