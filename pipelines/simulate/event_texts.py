"""One line about a committed record, for timelines."""

from __future__ import annotations

from typing import Any

from pipelines.inspect.audit.decode import DecodedRecord
from schemas.identity import trajectory_id
from schemas.records import Assignment, CommitNote, MicroBatch, Pause, Prompt, Settled, Trajectory, WeightVersion


def event_text(record: Any) -> str:
    """What a record says; "" for one that a timeline omits."""
    match record:
        case Prompt():
            return f"prompt {record.prompt_id}"
        case Assignment():
            start = f" from token {len(record.partial.token_ids)}" if record.partial is not None else ""
            return (
                f"{record.trajectory_id} to replica {record.replica}.{record.incarnation}, lease {record.lease}{start}"
            )
        case Trajectory():
            versions = ", ".join(str(span.version) for span in record.version_spans)
            return f"{record.trajectory_id} {record.finish_reason} on replica {record.replica}, version {versions}"
        case DecodedRecord():
            return f"{trajectory_id(*record.key)} scored"
        case Settled():
            return f"{record.trajectory_id} {record.outcome}" + ("" if record.batch is None else f" in {record.batch}")
        case MicroBatch():
            return f"batch {record.batch}, part {record.index + 1} of {record.count}: {len(record.trajectory_ids)} rows"
        case WeightVersion():
            return f"version {record.version}, batches {list(record.batches)}" + (", final" if record.final else "")
        case Pause():
            return f"request {record.number}: the run {'is paused' if record.paused else 'continues'}"
        case CommitNote():
            return ""
    return str(record)[:200]
