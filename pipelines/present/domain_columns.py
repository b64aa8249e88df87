"""What people look for in a row of any topic: whose it is, of which weights, how old, how good and how long."""

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
"""A record as `plain.to_plain` makes it."""


def domain_of(row: Row) -> dict[str, Any]:
    """The columns of `DOMAIN` of `row`, None where they do not apply.

    `tokens` are a response's, what it gained, or a prompt's.
    """
    made: Row = row.get("trajectory") or row  # an experience's are its trajectory's
    version, staleness = _version(made), row.get("staleness")
    newest = made.get("newest_version")
    if staleness is None and version and newest:
        staleness = max(0, _number(newest) - _number(version))
    return {
        "trajectory": _identity(made),
        "version": version,
        "staleness": staleness if isinstance(staleness, int) else None,
        "reward": row.get("reward"),
        "tokens": _tokens(made),
        "lease": _only(made["lease"] if "lease" in made else made.get("leases")),
    }


def domain_text(row: Row) -> str:
    """The same in words, before the row itself; "" where nothing applies."""
    found = domain_of(row)
    words = [
        found["trajectory"] or "",
        f"v{found['version']}" if found["version"] else "",
        *(f"{name} {found[name]:g}" for name in ("staleness", "reward", "tokens", "lease") if found[name] is not None),
    ]
    text = ", ".join(word for word in words if word)
    return f"[{text}] " if text else ""


def _identity(row: Row) -> str | None:
    prompt = row.get("prompt")
    if prompt and "member" in row:
        return trajectory_id(prompt["purpose"], prompt["number"], row["member"])
    return row.get("trajectory_id") or _only(row.get("trajectory_ids"))


def _version(row: Row) -> str | None:
    spans = row.get("version_spans")
    said = row.get("policy_version") or (spans[0]["version"] if spans else None) or row.get("version")
    return said if isinstance(said, str) else None


def _tokens(row: Row) -> int | None:
    made = row.get("response") or row.get("gained") or row.get("partial") or row
    tokens = made.get("token_ids")
    return len(tokens) if isinstance(tokens, list) else row.get("tokens")


def _only(value: Any) -> Any:
    """What is alone in a list; None of several."""
    return (value[0] if len(value) == 1 else None) if isinstance(value, list) else value


def _number(version: str) -> int:
    return int(version.partition(".")[2])
