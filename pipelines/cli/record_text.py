"""Stored records as JSON objects and as lines, with the keys that kcat's envelope has."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from infra.kafka.reading import StoredRecord
from schemas.plain import to_plain

MAX_LINE = 300


def as_json(record: StoredRecord) -> dict[str, Any]:
    """`record` as a JSON object: kcat's `topic partition offset ts key`, headers by name, `rows` decoded or `error`."""
    return {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "ts": record.timestamp,
        "key": None if record.key is None else record.key.decode(errors="replace"),
        "headers": {name: value.decode(errors="replace") for name, value in record.headers},
        "schema": record.schema,
        "size": record.size,
        "rows": [to_plain(row) for row in record.rows],
        "error": record.error,
    }


def as_line(item: Any) -> str:
    """What `as_json` made, as a line: where it stands, when, and what it is. Long rows are cut."""
    where = f"{item['partition']}:{item['offset']}"
    when = utc(item["ts"])
    if item["error"] is not None:
        return f"{where} {when} UNDECODABLE {item['schema'] or 'no schema'} ({item['size']} bytes): {item['error']}"
    rows = "; ".join(brief(row) for row in item["rows"])
    line = f"{where} {when} {item['schema']} {item['key'] or '-'} {rows}"
    return line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 1]}…"


def utc(milliseconds: int) -> str:
    """A Unix time in milliseconds as people read it, in UTC."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def brief(value: Any) -> str:
    """A row with its arrays as lengths: `token_ids[30]`; what is null or empty is left out."""
    if isinstance(value, dict):
        parts = []
        for name, part in value.items():
            if isinstance(part, list) and part and isinstance(part[0], int | float):
                parts.append(f"{name}[{len(part)}]")
            elif part not in (None, "", [], {}):
                parts.append(f"{name}={brief(part)}")
        return "{" + " ".join(parts) + "}"
    return json.dumps(value, ensure_ascii=False)
