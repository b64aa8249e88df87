"""Converts a run's log to a trace for Perfetto and chrome://tracing: generation, scoring, training, versions, moves.

It reads the log row by row, so memory does not grow with the run. Times are from the writers' clocks. The spans of a
trajectory share the trace id of its records, see `schemas.tracing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from infra.kafka.properties import ClientProperties
from pipelines.inspect.log.chunks import rows_of
from schemas.topics import EXPERIENCES, METRICS, PLANS, RELAY, TRAJECTORIES
from schemas.tracing import trace_id

TraceEvent = dict[str, Any]
ROLLOUT, SCORE, TRAINER, PLACEMENT = 1000, 1, 2, 3
"""Process ids of the trace: replica n is ROLLOUT + n."""
_PROCESS_NAMES = {SCORE: "score", TRAINER: "trainer", PLACEMENT: "placement"}


def events(client: ClientProperties, run: str) -> Iterator[TraceEvent]:
    """The trace events of `run`, unordered; times in microseconds, as the format requires."""
    replicas: set[int] = set()
    yield from (_process_name(number, name) for number, name in _PROCESS_NAMES.items())
    for row in rows_of(client, run, TRAJECTORIES, _TRAJECTORY):
        if row["replica"] not in replicas:
            replicas.add(row["replica"])
            yield _process_name(ROLLOUT + row["replica"], f"replica {row['replica']}")
        yield from trajectory_events(run, row)
    for row in rows_of(client, run, EXPERIENCES, _EXPERIENCE):
        yield from scoring_events(run, row)
    for row in rows_of(client, run, RELAY, _VERSION):
        yield _instant(TRAINER, f"version {row['version_epoch']}.{row['version_number']}", row["created_at"], {})
    for row in rows_of(client, run, PLANS, _PLAN):
        if row["moves"] is None:  # the outcome of a plan
            continue
        moved = sum(len(move["trajectory_ids"]) for move in row["moves"])
        yield _instant(PLACEMENT, f"{row['reason']}: {moved} moved", row["planned_at"], {"plan": row["plan_id"]})
    for row in rows_of(client, run, METRICS, _METRIC):
        yield from metric_events(row)


def trajectory_events(run: str, row: Mapping[str, Any]) -> Iterator[TraceEvent]:
    """A trajectory at its last owner: prefill until the first token, then decode."""
    started, ended = row["started_at"], row["finished_at"]
    arguments = {
        name: row[name]
        for name in ("policy_version", "staleness", "completion_tokens", "lease", "finish_reason", "token_sampler")
    }
    name, process = row["trajectory_id"], ROLLOUT + row["replica"]
    arguments["traceparent"] = trace_id(run, row["group_id"])
    yield from _span(process, name, name, started, ended, arguments)
    first = row["first_token_at"]
    if first is not None and started <= first <= ended:
        yield from _span(process, name, "prefill", started, first, {})
        yield from _span(process, name, "decode", first, ended, {})


def scoring_events(run: str, row: Mapping[str, Any]) -> Iterator[TraceEvent]:
    """A span from the end of a trajectory to its reward."""
    arguments = {"reward": row["reward"], "traceparent": trace_id(run, row["group_id"])}
    yield from _span(SCORE, row["trajectory_id"], row["trajectory_id"], row["finished_at"], row["scored_at"], arguments)


def metric_events(row: Mapping[str, Any]) -> Iterator[TraceEvent]:
    """A span for an optimizer step, which ends at the time of its metric; counters for rewards, staleness and rates."""
    values = {pair["name"]: pair["value"] for pair in row["values"]}
    at = row["measured_at"]
    if row["name"] == "trainer":
        seconds = values.get("time/update", 0.0)
        began = at.timestamp() - seconds
        yield {
            "ph": "X",
            "name": f"step {row['step']}",
            "cat": "trainer",
            "pid": TRAINER,
            "tid": 0,
            "ts": began * 1e6,
            "dur": seconds * 1e6,
            "args": values,
        }
    for name in ("reward/mean", "staleness/mean", "tokens_per_s"):
        if name in values:
            of = f" of replica {row['step']}" if row["name"] == "rollout" else ""
            arguments = {"value": values[name]}
            yield {"ph": "C", "name": f"{name}{of}", "pid": TRAINER, "ts": at.timestamp() * 1e6, "args": arguments}


def _span(
    process: int, identity: str, name: str, start: Any, end: Any, arguments: Mapping[str, Any]
) -> Iterator[TraceEvent]:
    """An asynchronous span, which may overlap others of its process."""
    shared = {"name": name, "cat": "trajectory", "pid": process, "tid": 0, "id": identity}
    yield {"ph": "b", **shared, "ts": start.timestamp() * 1e6, "args": dict(arguments)}
    yield {"ph": "e", **shared, "ts": max(start, end).timestamp() * 1e6}


def _instant(process: int, name: str, at: Any, arguments: Mapping[str, Any]) -> TraceEvent:
    return {
        "ph": "i",
        "s": "p",
        "name": name,
        "pid": process,
        "tid": 0,
        "ts": at.timestamp() * 1e6,
        "args": dict(arguments),
    }


def _process_name(process: int, name: str) -> TraceEvent:
    return {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}


_TRAJECTORY = (
    "trajectory_id",
    "group_id",
    "replica",
    "lease",
    "policy_version",
    "staleness",
    "completion_tokens",
    "finish_reason",
    "token_sampler",
    "started_at",
    "first_token_at",
    "finished_at",
)
_EXPERIENCE = ("trajectory_id", "group_id", "reward", "finished_at", "scored_at")
_VERSION = ("version_epoch", "version_number", "created_at")
_PLAN = ("plan_id", "reason", "moves", "planned_at")
_METRIC = ("name", "step", "values", "measured_at")
