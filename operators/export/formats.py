"""Reads and durably writes tables as files: Parquet, Arrow IPC, or JSON lines."""

from __future__ import annotations

import base64
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

from infra.arrow_files import DAMAGE, checked, open_parquet_file

Format = Literal["parquet", "arrow", "jsonl"]
ROW_GROUP_BYTES = 16 << 20


def write_table(file: Path, table: pa.Table, kind: Format) -> None:
    """Write and sync `table` to `file`. Raises OSError if that fails, and then leaves no file."""
    try:
        with file.open("wb") as out:
            _WRITERS[kind](out, table)
            out.flush()
            os.fsync(out.fileno())
    except BaseException:
        file.unlink(missing_ok=True)
        raise


def read_table(file: Path, kind: Format, schema: pa.Schema) -> pa.Table:
    """The rows of `file` with the columns of `schema`; missing columns are null. Raises ValueError if it is damaged."""
    try:
        if kind == "parquet":
            table = checked(open_parquet_file(file).read(), file)
        elif kind == "arrow":
            with pa.ipc.open_file(pa.memory_map(str(file))) as reader:
                table = checked(reader.read_all(), file)
        else:
            return _read_jsonl(file, schema)
    except DAMAGE as error:
        raise ValueError(f"{file} cannot be read as {kind}: {error}") from error
    try:
        return pa.concat_tables([schema.empty_table(), table], promote_options="default").select(schema.names)
    except pa.ArrowException as error:
        raise ValueError(f"{file} has columns of other types than its topic: {error}") from error


def _write_parquet(out: BinaryIO, table: pa.Table) -> None:
    flat = [field.name for field in table.schema if not pa.types.is_nested(field.type)]
    texts = [name for name in flat if pa.types.is_string(table.schema.field(name).type)]
    rows = max(1, len(table) * ROW_GROUP_BYTES // max(1, table.nbytes))
    pq.write_table(table, out, compression="zstd", use_dictionary=texts, write_statistics=flat, row_group_size=rows)


def _write_arrow(out: BinaryIO, table: pa.Table) -> None:
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)


def _write_jsonl(out: BinaryIO, table: pa.Table) -> None:
    for batch in table.to_batches(max_chunksize=256):
        for row in batch.to_pylist():
            out.write(orjson.dumps(json_value(row)) + b"\n")


def json_value(value: Any) -> Any:
    """`value` for JSON: times in ISO 8601, bytes in base64, and null for NaN and infinities."""
    if isinstance(value, dict):
        return {name: json_value(part) for name, part in value.items()}
    if isinstance(value, list):
        return [json_value(part) for part in value]
    if isinstance(value, datetime):
        return value.isoformat(timespec="milliseconds")
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read_jsonl(file: Path, schema: pa.Schema) -> pa.Table:
    def rows() -> Iterator[dict[str, Any]]:
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError(f"a row is not an object: {line[:40]!r}")
                yield {field.name: _from_json_value(row.get(field.name), field.type) for field in schema}

    try:
        return pa.Table.from_pylist(list(rows()), schema=schema)
    except OverflowError as error:
        raise ValueError(f"a number is too large: {error}") from error


def _from_json_value(value: Any, kind: pa.DataType) -> Any:
    if isinstance(value, str) and pa.types.is_timestamp(kind):
        return datetime.fromisoformat(value)
    return base64.b64decode(value) if isinstance(value, str) and pa.types.is_binary(kind) else value


_WRITERS: Mapping[Format, Callable[[BinaryIO, pa.Table], None]] = {
    "parquet": _write_parquet,
    "arrow": _write_arrow,
    "jsonl": _write_jsonl,
}
