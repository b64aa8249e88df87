"""Records of a topic as JSON objects with the keys of kcat's envelope, as table rows, and as lines."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import isfinite
from typing import Any

import pyarrow as pa

from infra.escaping import escape_to_one_line
from infra.kafka.record_batches import Headers
from infra.kafka.topic_reader import schema_of
from pipelines.inspect.log.chunks import LogChunk
from pipelines.present.domain_columns import DOMAIN, domain_of, domain_text
from pipelines.present.output import compact, rounded, utc

MAX_LINE = 300
TAIL_SCHEMA = pa.schema(
    {"partition": pa.int32(), "offset": pa.int64(), "ts": pa.int64(), "schema": pa.utf8(), "key": pa.utf8()}
    | DOMAIN
    | {"value": pa.utf8(), "error": pa.utf8()}
)
"""The columns of `laminar topics tail`, one table row for each row of a record; `value` is JSON."""
TAIL_COLUMNS = [name for name in TAIL_SCHEMA.names if name not in ("ts", "value")]


def as_items(chunk: LogChunk, topic: str) -> Iterator[dict[str, Any]]:
    """Yield records as JSON objects: kcat's `topic partition offset ts key`, headers by name, and `rows` or `error`."""
    records = chunk.records
    columns = (records.offsets, records.timestamps, records.keys, records.values, records.headers)
    for offset, timestamp, key, value, headers, error, rows in zip(*columns, chunk.errors, chunk.plain(), strict=True):
        schema, header_texts = _schema_and_headers(headers)
        yield {
            "topic": topic,
            "partition": records.partition,
            "offset": offset,
            "ts": timestamp,
            "key": None if key is None else key.decode(errors="replace"),
            "headers": header_texts,
            "schema": schema,
            "size": len(value or b""),
            "rows": rows,
            "error": error,
        }


@lru_cache(maxsize=1000)
def _schema_and_headers(headers: Headers) -> tuple[str, dict[str, str]]:
    """Return a record's schema and its headers as text; cached, because most records repeat the headers."""
    return schema_of(headers), {name: value.decode(errors="replace") for name, value in headers}


def as_rows(item: Any) -> list[dict[str, Any]]:
    """Return an item of `as_items` in `TAIL_SCHEMA`: a table row for each of its rows, an empty one if it has none."""
    common = {name: item[name] for name in ("partition", "offset", "ts", "schema", "key")}
    return [
        common | domain_of(row) | {"value": compact(row) if row else None, "error": item["error"]}
        for row in item["rows"] or [{}]
    ]


def as_line(item: Any) -> str:
    """Return an item of `as_items` as a line: position, time, schema, key, rows; cut at `MAX_LINE` characters."""
    position = f"{item['partition']}:{item['offset']}"
    written = utc(item["ts"])
    if item["error"] is not None:
        what = f"UNDECODABLE {item['schema'] or 'no schema'} ({item['size']} bytes)"
        return escape_to_one_line(f"{position} {written} {what}: {item['error']}")
    rows = "; ".join(domain_text(row) + _completion(row) + brief(row) for row in item["rows"])
    line = f"{position} {written} {item['schema']} {item['key'] or '-'} {rows}"
    return escape_to_one_line(line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 1]}…")


def _completion(row: Any) -> str:
    """Return the response of a trajectory, to stand before its other fields; "" for other rows."""
    source = row.get("trajectory") or row
    return f"{compact(source['text'])} " if "response" in source and "text" in source else ""


def brief(value: Any) -> str:
    """Return a row as text, arrays of numbers as lengths (`token_ids[30]`), without null and empty fields."""
    if isinstance(value, dict):
        parts = []
        for name, part in value.items():
            if isinstance(part, list) and part and isinstance(part[0], int | float):
                parts.append(f"{name}[{len(part)}]")
            elif part not in (None, "", [], {}):
                parts.append(f"{name}={brief(part)}")
        return "{" + " ".join(parts) + "}"
    return rounded(value) if isinstance(value, float) and isfinite(value) else compact(value)
