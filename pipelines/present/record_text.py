"""Records of a topic as JSON objects (with the keys of kcat's envelope), table rows, lines, and in kcat's formats."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from math import isfinite
from typing import Any

import pyarrow as pa

from infra.escaping import escape_to_one_line
from infra.kafka.topic_reader import schema_of
from pipelines.inspect.log.chunks import LogChunk
from pipelines.present.output import Row, compact, rounded, utc
from schemas.codec import Headers
from schemas.identity import trajectory_id

DOMAIN: dict[str, pa.DataType] = {
    "trajectory": pa.utf8(),
    "version": pa.utf8(),
    "staleness": pa.int64(),
    "reward": pa.float64(),
    "tokens": pa.int64(),
    "lease": pa.int64(),
}


def domain_of(row: Row) -> dict[str, Any]:
    """Return the `DOMAIN` columns of `row`, None where a column does not apply.

    `tokens` counts a response, the new tokens of a progress record, or a prompt.
    """
    source: Row = row.get("trajectory") or row  # an experience has the columns of its trajectory
    version, staleness = _version(source), row.get("staleness")
    newest = source.get("newest_version")
    if staleness is None and version and newest:
        staleness = max(0, _number(newest) - _number(version))
    return {
        "trajectory": _identity(source),
        "version": version,
        "staleness": staleness if isinstance(staleness, int) else None,
        "reward": row.get("reward"),
        "tokens": _tokens(source),
        "lease": _only(source["lease"] if "lease" in source else source.get("leases")),
    }


def domain_text(row: Row) -> str:
    """Return the domain columns as text, to stand before the row; "" if none applies."""
    columns = domain_of(row)
    numbers = [name for name in ("staleness", "reward", "tokens", "lease") if columns[name] is not None]
    parts = [
        columns["trajectory"] or "",
        f"v{columns['version']}" if columns["version"] else "",
        *(f"{name} {columns[name]:g}" for name in numbers),
    ]
    text = ", ".join(part for part in parts if part)
    return f"[{text}] " if text else ""


def _identity(row: Row) -> str | None:
    prompt = row.get("prompt")
    if prompt and "member" in row:
        return trajectory_id(prompt["purpose"], prompt["number"], row["member"])
    return row.get("trajectory_id") or _only(row.get("trajectory_ids"))


def _version(row: Row) -> str | None:
    spans = row.get("version_spans")
    version = row.get("policy_version") or (spans[0]["version"] if spans else None) or row.get("version")
    return version if isinstance(version, str) else None


def _tokens(row: Row) -> int | None:
    source = row.get("response") or row.get("gained") or row.get("partial") or row
    tokens = source.get("token_ids")
    return len(tokens) if isinstance(tokens, list) else row.get("tokens")


def _only(value: Any) -> Any:
    """Return the only item of a list, None for several items; `value` itself if it is no list."""
    return (value[0] if len(value) == 1 else None) if isinstance(value, list) else value


def _number(version: str) -> int:
    return int(version.partition(".")[2])


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


Item = Mapping[str, Any]
"""A record as yielded by `record_text.as_items`."""

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "0": "\0"}
_PARTS: Mapping[str, Callable[[Item], Any]] = {
    "t": lambda item: item["topic"],
    "p": lambda item: item["partition"],
    "o": lambda item: item["offset"],
    "k": lambda item: "" if item["key"] is None else item["key"],
    "K": lambda item: -1 if item["key"] is None else len(item["key"].encode()),
    "s": lambda item: payload(item),
    "v": lambda item: payload(item),
    "S": lambda item: item["size"],
    "T": lambda item: item["ts"],
    "h": lambda item: ",".join(f"{name}={value}" for name, value in item["headers"].items()),
    "%": lambda item: "%",
}
_PIECE = re.compile(r"%(.?)|\\(.)")


def payload(item: Item) -> str:
    """Return the decoded record as JSON: one row, or a list of several; "" if it cannot be decoded."""
    if item["error"] is not None:
        return ""
    rows = item["rows"]
    return compact(rows[0] if len(rows) == 1 else rows)


def envelope(item: Item) -> dict[str, Any]:
    """Return kcat's JSON envelope; its payload is a string that contains JSON."""
    return {
        "topic": item["topic"],
        "partition": item["partition"],
        "offset": item["offset"],
        "tstype": "create",
        "ts": item["ts"],
        "broker": -1,
        "headers": [part for header in item["headers"].items() for part in header],
        "key": item["key"],
        "payload": None if item["error"] is not None else payload(item),
    }


def formatter(text: str) -> Callable[[Item], str]:
    r"""Return a formatter of kcat's `-f` format: %t %p %o %k %s (or %v) %S %K %h %T %%, \n, \t. Raises ValueError."""
    for found in _PIECE.finditer(text):
        if found[1] is not None and found[1] not in _PARTS:
            raise ValueError(f"%{found[1]} is not a format; the formats are {' '.join(f'%{name}' for name in _PARTS)}")
    text = text.removesuffix("\\n")  # the printer ends the line

    def line(item: Item) -> str:
        def piece(found: re.Match[str]) -> str:
            if found[1] is None:
                return _ESCAPES.get(found[2], found[0])
            return escape_to_one_line(str(_PARTS[found[1]](item)))

        return _PIECE.sub(piece, text)

    return line
