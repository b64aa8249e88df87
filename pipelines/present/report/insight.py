"""What a run's page takes from its log: the plans of placement, and the trajectories that took longest."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from infra.kafka.properties import ClientProperties
from pipelines.inspect.log.rows import rows_of
from schemas.topics import PLANS, TRAJECTORIES

MOST = 10
_SLOW = (
    "trajectory_id",
    "replica",
    "policy_version",
    "completion_tokens",
    "finish_reason",
    "started_at",
    "finished_at",
)
_PLAN = ("plan_id", "reason", "moves")


def insight(client: ClientProperties, run: str) -> dict[str, Any]:
    """Both, JSON-ready; empty where the run has no such topics. Memory does not grow with the run."""
    return {
        "plans": plans_of(rows_of(client, run, PLANS, _PLAN)),
        "slowest": slowest(rows_of(client, run, TRAJECTORIES, _SLOW)),
    }


def plans_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """By reason: how many plans, moves, trajectories moved, and KV tokens that they held."""
    found: dict[str, Counter[str]] = {}
    for row in rows:
        counts = found.setdefault(row["reason"], Counter())
        counts["plans"] += 1
        counts["moves"] += len(row["moves"])
        counts["trajectories"] += sum(len(move["trajectory_ids"]) for move in row["moves"])
        counts["kv_tokens"] += sum(move["kv"] for move in row["moves"])
    return {reason: dict(counts) for reason, counts in sorted(found.items())}


def slowest(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The trajectories that their last owner had longest, in seconds."""
    told = (
        {name: row[name] for name in _SLOW[:-2]}
        | {"seconds": round((row["finished_at"] - row["started_at"]).total_seconds(), 3)}
        for row in rows
    )
    return heapq.nlargest(MOST, told, key=lambda each: each["seconds"])
