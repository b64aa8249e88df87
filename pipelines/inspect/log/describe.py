"""Describes the records of a trajectory's history in text."""

from __future__ import annotations

from typing import Any

from infra.counted import counted
from infra.workers.error_text import first_line
from pipelines.inspect.log.history import TrajectoryHistory
from schemas.records import (
    Assignment,
    AssignmentRejected,
    Cancel,
    DeadLetter,
    EpisodeEnd,
    Experience,
    MicroBatch,
    Pause,
    Progress,
    Prompt,
    Release,
    RepackPlan,
    Reserve,
    Settled,
    Trajectory,
    TrajectoryClosed,
    TurnEnded,
    TurnRequest,
    WeightVersion,
)

MAX_CHARACTERS = 100


def describe_outcome(history: TrajectoryHistory) -> str:
    """The outcome of the trajectory, in one line."""
    trajectory, scored = history.trajectory, history.first(Experience)
    settled, version = history.first(Settled), history.first(WeightVersion)
    if trajectory is None:
        return "not finished"
    tokens = counted(len(trajectory.response.token_ids), "token")
    parts = [f"{trajectory.prompt.task}, {trajectory.finish_reason} after {tokens}"]
    if trajectory.prompt.purpose == "imported":
        parts.append(f"imported from {trajectory.prompt.round}")
    elif trajectory.policy_version is not None:
        parts.append(f"generated under version {trajectory.policy_version}")
    parts.append(f"reward {scored.record.reward:g}" if scored else "not scored yet")
    if settled is None:
        parts.append("not settled yet")
    elif settled.record.batch is None:
        parts.append(f"{settled.record.outcome}: {settled.record.reason}")
    else:
        into = f"trained into version {version.record.version}" if version else "not trained yet"
        age = settled.record.staleness
        decided = "" if age is None else f", decided when its version was {_behind(age)}"
        parts.append(f"in batch {settled.record.batch}{decided}, {into}")
    return ", ".join(parts)


def _behind(staleness: int) -> str:
    return f"{counted(staleness, 'version')} behind the newest" if staleness else "the newest"


def describe_record(record: Any) -> str:
    """The content of `record`, in one line, without its prompt or trajectory."""
    match record:
        case Prompt():
            return f"prompt, {record.samples} samples: {_cut(record.text)}"
        case Assignment():
            resume = f", to resume after {counted(len(record.partial.token_ids), 'token')}" if record.partial else ""
            version = f" under {record.policy_version}" if record.policy_version else ""
            return f"assigned to replica {record.replica}{version}, lease {record.lease}{_attempt(record)}{resume}"
        case Progress():
            moves = record.next_owner
            hand_over = f"; handed over to replica {moves.replica}, lease {moves.lease}" if moves else ""
            gained = f"{counted(len(record.gained.token_ids), 'token')} after the first {record.start}"
            return f"replica {record.replica}, lease {record.lease}{_attempt(record)}: {gained}{hand_over}"
        case TurnRequest():
            known = sum(each.stop - each.start for each in record.context)
            return f"the agent requests a turn: {known} recorded and {counted(len(record.token_ids), 'new token')}"
        case TurnEnded():
            error = f": {record.error}" if record.error else ""
            return f"turn of {counted(record.stop - record.start, 'token')} ended ({record.finish_reason}){error}"
        case EpisodeEnd():
            reward = "" if record.reward is None else f" with reward {record.reward:g}"
            return f"the agent ended{reward}{f': {record.error}' if record.error else ''}"
        case AssignmentRejected():
            return f"rejected by replica {record.replica}, lease {record.lease}: {record.reason}"
        case Reserve():
            return f"replica {record.replica} reserves capacity for it, plan {record.plan_id}"
        case Release():
            return f"replica {record.replica} must hand it over to replica {record.destination}, plan {record.plan_id}"
        case Cancel():
            return f"replica {record.replica} must cancel it"
        case TrajectoryClosed():
            return "closed: later progress is ignored"
        case RepackPlan():
            return f"plan {record.plan_id} ({record.reason}) moves it"
        case Trajectory():
            error = f": {record.error}" if record.error else ""
            versions = ", ".join(str(span.version) for span in record.version_spans) or "none"
            ended = f"{record.finish_reason} on replica {record.replica}, lease {record.lease}{_attempt(record)}"
            sampler = ", by vLLM's sampler" if record.token_sampler == "vllm" else ""
            return f"{ended}, version {versions}{sampler}{error}"
        case Experience():
            weighted = " + ".join(
                f"{part.name} {part.value:g} × {part.weight:g}" for part in record.components if part.weight
            )
            others = "".join(
                f", {part.name} {part.value:g} (weight 0)" for part in record.components if not part.weight
            )
            error = f": {first_line(record.error)}" if record.error else ""
            return f"reward {record.reward:g}{f' = {weighted}' if weighted else ''}{others}{error}"
        case Settled():
            stale = "" if record.staleness is None else f" when its version was {_behind(record.staleness)}"
            return f"{record.outcome}{stale}{f': {record.reason}' if record.reason else ''}"
        case MicroBatch():
            return f"batch {record.batch}, part {record.index + 1} of {record.count} of rank {record.rank}"
        case WeightVersion():
            final = ", final" if record.final else ""
            return f"version {record.version}, batches {list(record.batches)}, step {record.step}{final}"
        case Pause():
            return f"request {record.number}: the run {'is paused' if record.paused else 'continues'}"
        case DeadLetter():
            return f"{record.step} cannot process {record.topic} {record.partition}:{record.offset}: {record.reason}"
    return type(record).__name__


def _attempt(record: Any) -> str:
    return f", attempt {record.attempt}" if record.attempt else ""


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_CHARACTERS else f"{line[: MAX_CHARACTERS - 1]}…"
