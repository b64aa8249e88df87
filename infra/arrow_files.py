"""Tables in files that others wrote: what is damaged is rejected before the first value is read.

Readers of Arrow trust the offsets in a file: reading a value by a wrong one can read other memory of the process.
"""

from __future__ import annotations

from typing import TypeVar

import pyarrow as pa

DAMAGE = (pa.ArrowException, OSError, ValueError, KeyError, RecursionError)
"""The exceptions by which libraries reject a damaged file."""
Rows = TypeVar("Rows", pa.Table, pa.RecordBatch)


def checked(rows: Rows) -> Rows:
    """`rows`, of which every offset, index and text is valid, names included. Raises one of `DAMAGE`."""
    rows.validate(full=True)
    for field in rows.schema:
        _check_names(field)
    return rows


def _check_names(field: pa.Field) -> None:
    field.name.encode()  # raises UnicodeError
    for number in range(field.type.num_fields):
        _check_names(field.type.field(number))
