"""`laminar autoscale`: a line for each decision and outcome."""

from __future__ import annotations

import pyarrow as pa
import pytest

from pipelines.cli.autoscale import COLUMNS, _schema, scaling_line, scaling_row
from pipelines.present.output import Form, RowOutput, show
from schemas.records import ScalingDecision, ScalingOutcome

AT = 1_700_000_000_000
DECISION = ScalingDecision(4, "queue", 2, 2, 3, "1.50 requests a slot, above 1", False, AT)


@pytest.mark.parametrize("form", ["table", "csv", "csv-raw", "arrow", "json", "jsonl", "lines"])
def test_decisions_and_outcomes_are_one_table(form: Form, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    rows = [[scaling_row(each)] for each in (DECISION, ScalingOutcome(4, "local", 3, "", 12.4, AT))]
    show(RowOutput(rows, COLUMNS, form, line=scaling_line, schema=_schema))
    out = capfdbinary.readouterr().out
    if form == "arrow":
        shown = pa.ipc.open_stream(out).read_all().to_pylist()
        assert [(each["event"], each["before"], each["seconds"]) for each in shown] == [
            ("decided", 2, None),
            ("reached", None, 12.4),
        ]
        assert all(row[0].items() <= each.items() for row, each in zip(rows, shown, strict=True))
    else:
        assert b"reached" in out or form == "lines"


@pytest.mark.parametrize(
    ("record", "event", "text"),
    [
        (DECISION, "decided", "decision 4: 2 → 3 rollout processes, queue: 1.50 requests a slot, above 1"),
        (
            ScalingDecision(5, "queue", 2, 3, 2, "0.10 requests a slot, below 0.5", True, AT),
            "dry run",
            "decision 5 (dry run): 3 → 2 rollout processes, queue: 0.10 requests a slot, below 0.5",
        ),
        (
            ScalingOutcome(4, "local", 3, "", 12.4, AT),
            "reached",
            "decision 4: rollout processes that generate: 3, after 12 s",
        ),
        (
            ScalingOutcome(4, "kubernetes", 2, "403 Forbidden", 0.1, AT),
            "failed",
            "decision 4: kubernetes failed: 403 Forbidden",
        ),
    ],
)
def test_scaling_records_are_rows_and_lines(record: ScalingDecision | ScalingOutcome, event: str, text: str) -> None:
    row = scaling_row(record)
    assert (row["event"], row["number"], row["at"]) == (event, record.number, AT)
    assert scaling_line(row) == f"2023-11-14 22:13:20 {text}"
