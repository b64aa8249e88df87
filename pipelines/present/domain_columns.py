"""The domain columns of a row of any topic: trajectory, weight version, staleness, reward, tokens and lease."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from schemas.identity import trajectory_id

DOMAIN: dict[str, pa.DataType] = {
    "trajectory": pa.utf8(),
    "version": pa.utf8(),
    "staleness": pa.int64(),
    "reward": pa.float64(),
    "tokens": pa.int64(),
    "lease": pa.int64(),
}
Row = Mapping[str, Any]
"""A record as returned by `plain.to_plain`."""


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
