"""Tables as files, durable when written: Parquet, Arrow IPC, or a JSON object a line."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

Format = Literal["parquet", "arrow", "jsonl"]
ROW_GROUP_BYTES = 16 << 20
_CHUNK = 1 << 20


def write_table(file: Path, table: pa.Table, kind: Format) -> None:
    """Write `table` to `file`, on the disk when it returns. Raises OSError, having left nothing, where it cannot be."""
    try:
        with file.open("wb") as out:
            _WRITERS[kind](out, table)
            out.flush()
            os.fsync(out.fileno())
    except BaseException:
        file.unlink(missing_ok=True)
        raise


def read_table(file: Path, kind: Format, schema: pa.Schema) -> pa.Table:
    """The rows in `file` as `schema` has them, null where it lacks a column. Raises ValueError where it is damaged."""
    try:
        if kind == "parquet":
            table = pq.ParquetFile(file).read()
        elif kind == "arrow":
            with pa.ipc.open_file(pa.memory_map(str(file))) as reader:
                table = reader.read_all()
        else:
            return _from_lines(file, schema)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file} cannot be read as {kind}: {error}") from error
    try:
        return pa.concat_tables([schema.empty_table(), table], promote_options="default").select(schema.names)
    except pa.ArrowException as error:
        raise ValueError(f"{file} has columns of other types than its topic: {error}") from error


def sha256(file: Path) -> str:
    """The hash of a file's bytes."""
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def _parquet(out: BinaryIO, table: pa.Table) -> None:
    flat = [field.name for field in table.schema if not pa.types.is_nested(field.type)]
    texts = [name for name in flat if pa.types.is_string(table.schema.field(name).type)]
    rows = max(1, len(table) * ROW_GROUP_BYTES // max(1, table.nbytes))
    pq.write_table(table, out, compression="zstd", use_dictionary=texts, write_statistics=flat, row_group_size=rows)


def _arrow(out: BinaryIO, table: pa.Table) -> None:
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)


def _lines(out: BinaryIO, table: pa.Table) -> None:
    for batch in table.to_batches(max_chunksize=256):
        for row in batch.to_pylist():
            out.write(orjson.dumps(plain(row)) + b"\n")


def plain(value: Any) -> Any:
    """`value` for JSON: times in ISO 8601, bytes in base64, and null for numbers that JSON has none for."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [plain(part) for part in value]
    if isinstance(value, datetime):
        return value.isoformat(timespec="milliseconds")
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _from_lines(file: Path, schema: pa.Schema) -> pa.Table:
    def rows() -> Iterator[dict[str, Any]]:
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                yield {field.name: _revived(row.get(field.name), field.type) for field in schema}

    try:
        return pa.Table.from_pylist(list(rows()), schema=schema)
    except (pa.ArrowException, OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{file} cannot be read as jsonl: {error}") from error


def _revived(value: Any, kind: pa.DataType) -> Any:
    if isinstance(value, str) and pa.types.is_timestamp(kind):
        return datetime.fromisoformat(value)
    return base64.b64decode(value) if isinstance(value, str) and pa.types.is_binary(kind) else value


_WRITERS: Mapping[Format, Callable[[BinaryIO, pa.Table], None]] = {
    "parquet": _parquet,
    "arrow": _arrow,
    "jsonl": _lines,
}
