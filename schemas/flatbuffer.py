"""Minimal flatbuffer access: Arrow encodes the metadata of its messages as flatbuffers."""

from __future__ import annotations

import struct

import pyarrow as pa


def table_at(data: bytes | pa.Buffer, position: int) -> int:
    """The position to which the reference at `position` points. Raises struct.error beyond the data."""
    return position + int(struct.unpack_from("<I", data, position)[0])


def field_of(data: bytes | pa.Buffer, table: int, number: int) -> int:
    """The position of field `number` of `table`, by its vtable; 0 if it is absent. Raises struct.error."""
    (distance,) = struct.unpack_from("<i", data, table)
    (size,) = struct.unpack_from("<H", data, table - distance)
    entry = 4 + 2 * number
    offset = int(struct.unpack_from("<H", data, table - distance + entry)[0]) if entry < size else 0
    return table + offset if offset else 0
