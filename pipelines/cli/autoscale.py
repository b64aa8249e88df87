"""`laminar autoscale`: the decisions about the number of rollout processes, and what became of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from infra.kafka.offset_span import Edge
from infra.kafka.topic_reader import StoredRecord, last_records, read_topic
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Address, FollowOption, LastOption, Printing
from pipelines.present.output import RowOutput, utc
from schemas.plain import to_plain
from schemas.records import ScalingDecision, ScalingOutcome
from schemas.topics import SCALING

app = Commands()
COLUMNS = ("number", "at", "event", "running", "before", "target", "reason")


@app.command()
def autoscale(address: Address, printing: Printing, count: LastOption = 20, follow: FollowOption = False) -> RowOutput:
    """Show the autoscaler's decisions about the number of rollout processes, with their reasons and outcomes.

    An outcome says that as many processes as decided generate, or why the decision could not be carried out so far.
    Decisions of a dry run (autoscaling.dry_run) are not carried out.

    \b
    Examples:
      laminar autoscale
      laminar autoscale --follow
      laminar autoscale --json | jq '.[] | select(.event == "failed") | .reason'
    """
    connection = address.open_log()
    name = SCALING.name(connection.run)
    records = last_records(connection.client, name, count) if count else []
    rows: Iterator[dict[str, Any]] = _rows(records)
    if follow:
        after = Edge("offset", records[-1].offset + 1) if records else Edge("end", 0)
        rows = chain(rows, _rows(read_topic(connection.client, name, start=after, follow=True)))
    none = f"the autoscaler of run {connection.run} has not decided anything, or the run has none ([autoscaling])"
    form = printing.form("lines", follow=follow)
    return RowOutput(([row] for row in rows), COLUMNS, form, none, line=scaling_line, schema=_schema)


def _schema() -> Any:
    """The columns of decisions and outcomes, for Arrow and CSV."""
    import pyarrow as pa

    numbers = ("number", "at", "running", "before", "target")
    texts = ("event", "reason", "policy", "actuator")
    fields = {**dict.fromkeys(numbers, pa.int64()), **dict.fromkeys(texts, pa.string())}
    return pa.schema({**fields, "seconds": pa.float64(), "dry_run": pa.bool_()})


def _rows(records: Iterable[StoredRecord]) -> Iterator[dict[str, Any]]:
    return (scaling_row(row) for record in records for row in record.rows)


def scaling_row(row: ScalingDecision | ScalingOutcome) -> dict[str, Any]:
    """Return the row of a decision, or of the outcome of one."""
    plain = to_plain(row)
    if isinstance(row, ScalingDecision):
        return {"event": "dry run" if row.dry_run else "decided", "at": plain.pop("decided_at"), **plain}
    event, at = "failed" if row.error else "reached", plain.pop("ended_at")
    return {"event": event, "at": at, "reason": plain.pop("error"), **plain}


def scaling_line(row: Any) -> str:
    """Return the row as a line of text."""
    head = f"{utc(row['at'])} decision {row['number']}"
    if row["event"] == "reached":
        return f"{head}: rollout processes that generate: {row['running']}, after {row['seconds']:.0f} s"
    if row["event"] == "failed":
        return f"{head}: {row['actuator']} failed: {row['reason']}"
    dry = " (dry run)" if row["event"] == "dry run" else ""
    return f"{head}{dry}: {row['before']} → {row['target']} rollout processes, {row['policy']}: {row['reason']}"
