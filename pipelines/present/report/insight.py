"""The parts of a run's report that come from its log: placement's plans and the slowest trajectories."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from infra.kafka.properties import ClientProperties
from pipelines.inspect.log.chunks import rows_of
from schemas.topics import PLANS, TRAJECTORIES

MAX_SLOWEST = 10
_TRAJECTORY_COLUMNS = (
    "trajectory_id",
    "replica",
    "policy_version",
    "completion_tokens",
    "finish_reason",
    "started_at",
    "finished_at",
)
_PLAN_COLUMNS = ("plan_id", "reason", "moves")


def insight(client: ClientProperties, run: str) -> dict[str, Any]:
    """Return both, JSON-ready; empty if the run has no such topics. Memory use does not grow with the run."""
    return {
        "plans": plans_of(rows_of(client, run, PLANS, _PLAN_COLUMNS)),
        "slowest": slowest(rows_of(client, run, TRAJECTORIES, _TRAJECTORY_COLUMNS)),
    }


def plans_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return by reason the numbers of plans, moves, moved trajectories, and their KV tokens."""
    found: dict[str, Counter[str]] = {}
    for row in rows:
        counts = found.setdefault(row["reason"], Counter())
        counts["plans"] += 1
        counts["moves"] += len(row["moves"])
        counts["trajectories"] += sum(len(move["trajectory_ids"]) for move in row["moves"])
        counts["kv_tokens"] += sum(move["kv_tokens"] for move in row["moves"])
    return {reason: dict(counts) for reason, counts in sorted(found.items())}


def slowest(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the trajectories with the longest time on their last owner, in seconds."""
    timed = (
        {name: row[name] for name in _TRAJECTORY_COLUMNS[:-2]}
        | {"seconds": round((row["finished_at"] - row["started_at"]).total_seconds(), 3)}
        for row in rows
    )
    return heapq.nlargest(MAX_SLOWEST, timed, key=lambda each: each["seconds"])
