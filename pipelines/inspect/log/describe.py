"""What records of a trajectory's life say, in words."""

from __future__ import annotations

from typing import Any

from pipelines.inspect.log.history import History
from schemas.records import (
    Assignment,
    AssignmentRejected,
    Cancel,
    Experience,
    MicroBatch,
    Progress,
    Prompt,
    Release,
    RepackPlan,
    Reserve,
    Settled,
    Trajectory,
    TrajectoryClosed,
    WeightVersion,
)

LONGEST = 100


def describe_outcome(life: History) -> str:
    """What became of the trajectory, in a line."""
    finished, scored = life.first(Trajectory), life.first(Experience)
    settled, version = life.first(Settled), life.first(WeightVersion)
    if finished is None:
        return "not finished"
    trajectory = finished.record
    words = [f"{trajectory.prompt.task}, {trajectory.finish_reason} after {len(trajectory.response.token_ids)} tokens"]
    if trajectory.policy_version is not None:
        words.append(f"under version {trajectory.policy_version}")
    words.append(f"reward {scored.record.reward:g}" if scored else "not scored yet")
    if settled is None:
        words.append("not settled yet")
    elif settled.record.outcome != "batched":
        words.append(f"{settled.record.outcome}: {settled.record.reason}")
    else:
        into = f"which made version {version.record.version}" if version else "not trained yet"
        words.append(f"in batch {settled.record.batch}, {into}")
    return ", ".join(words)


def describe_record(record: Any) -> str:
    """What `record` says, in a line."""
    match record:
        case Prompt():
            return f"prompt, {record.samples} samples: {_cut(record.text)}"
        case Assignment():
            begins = f", to go on after {len(record.partial.token_ids)} tokens" if record.partial else ""
            version = f" under {record.policy_version}" if record.policy_version else ""
            return f"assigned to replica {record.replica}{version}, lease {record.lease}{_attempt(record)}{begins}"
        case Progress():
            moves = record.next_owner
            gone = f"; handed over to replica {moves.replica}, lease {moves.lease}" if moves else ""
            gained = f"{len(record.gained.token_ids)} tokens after {record.start}"
            return f"replica {record.replica}, lease {record.lease}{_attempt(record)}: {gained}{gone}"
        case AssignmentRejected():
            return f"refused by replica {record.replica}, lease {record.lease}: {record.reason}"
        case Reserve():
            return f"replica {record.replica} keeps room for it, plan {record.plan_id}"
        case Release():
            return f"replica {record.replica} is to hand it over to replica {record.destination}, plan {record.plan_id}"
        case Cancel():
            return f"replica {record.replica} is to stop working on it"
        case TrajectoryClosed():
            return "closed: what is said of it later does not count"
        case RepackPlan():
            return f"plan {record.plan_id} ({record.reason}) moves it"
        case Trajectory():
            error = f": {record.error}" if record.error else ""
            return f"finished by replica {record.replica}, lease {record.lease}{_attempt(record)}{error}"
        case Experience():
            parts = ", ".join(f"{part.name} {part.value:g} × {part.weight:g}" for part in record.components)
            return (
                f"reward {record.reward:g}{f' = {parts}' if parts else ''}{f': {record.error}' if record.error else ''}"
            )
        case Settled():
            stale = "" if record.staleness is None else f", {record.staleness} versions old"
            return f"{record.outcome}{stale}{f': {record.reason}' if record.reason else ''}"
        case MicroBatch():
            return f"batch {record.batch}, part {record.index + 1} of {record.count} of rank {record.rank}"
        case WeightVersion():
            return f"version {record.version} was made of that batch, step {record.step}"
    return type(record).__name__


def _attempt(record: Any) -> str:
    return f", attempt {record.attempt}" if record.attempt else ""


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
