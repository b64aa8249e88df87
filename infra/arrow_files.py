"""Tables in files that others wrote: what is damaged is rejected before the first value is read.

Readers of Arrow trust the offsets in a file: reading a value by a wrong one can read other memory of the process.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

DAMAGE = (pa.ArrowException, OSError, ValueError, KeyError, RecursionError)
"""The exceptions by which libraries reject a damaged file."""
MAX_ROWS_OF_SMALL_FILES, MAX_ROWS_PER_BYTE = 1 << 16, 256
"""A column without values needs no bytes in a file, and eight per row in memory once it is filled."""
Rows = TypeVar("Rows", pa.Table, pa.RecordBatch)


def open_parquet_file(path: Path) -> pq.ParquetFile:
    """The Parquet file `path`, whose number of rows is plausible. Raises one of `DAMAGE`."""
    opened = pq.ParquetFile(path)
    _check_rows(opened.metadata.num_rows, path)
    return opened


def checked(rows: Rows, path: Path) -> Rows:
    """The rows of the file `path`, of which every offset, index and text is valid, names included.

    Raises one of `DAMAGE`.
    """
    _check_rows(rows.num_rows, path)
    rows.validate(full=True)
    for field in rows.schema:
        _check_names(field)
    return rows


def _check_rows(rows: int, path: Path) -> None:
    size = path.stat().st_size
    if rows > MAX_ROWS_OF_SMALL_FILES + MAX_ROWS_PER_BYTE * size:
        raise ValueError(f"{rows} rows in {size} bytes")


def _check_names(field: pa.Field) -> None:
    field.name.encode()  # raises UnicodeError
    for number in range(field.type.num_fields):
        _check_names(field.type.field(number))
