"""`laminar autoscale`: a line for each decision and outcome."""

from __future__ import annotations

import pytest

from pipelines.cli.autoscale import scaling_line, scaling_row
from schemas.records import ScalingDecision, ScalingOutcome

AT = 1_700_000_000_000
DECISION = ScalingDecision(4, "queue", 2, 2, 3, "1.50 requests a slot, above 1", False, AT)


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
