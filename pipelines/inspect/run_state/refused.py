"""Which records of a run's topics are of another program, so that the state of the run leaves them out."""

from __future__ import annotations

from typing import Any

from infra.clocks import wall_ms
from operators.io.validation import invalid_reason
from pipelines.inspect.metrics_file import LAG, PHASE, POSITION, REPLICA, UNREADABLE, VERSION
from schemas.records import Metric, WeightVersion

MAX_AHEAD_MS = 24 * 3600 * 1000
"""How far a writer's clock may be ahead of the reader's."""
ROLLOUT = "rollout"
"""The metrics that a thread writes without a transaction, with its heartbeats."""
_OF_THE_FILE = (LAG, PHASE, POSITION, REPLICA, UNREADABLE, VERSION, "warm_start")


def refused(record: Any, transactional: bool) -> str | None:
    """Why an observer ignores `record`, which was written in a transaction or not; None if it counts.

    A step counts only in a metric that was written in a transaction: those are the sinks of the roles.
    """
    if isinstance(record, WeightVersion):
        at = record.created_at  # the roles validate manifests; here they are only shown
    elif (reason := invalid_reason(record)) is not None:
        return reason
    elif isinstance(record, Metric):
        if not transactional and record.name != ROLLOUT:
            return f"a metric {record.name[:40]!r} that no role wrote: it is not part of a transaction"
        if record.name in _OF_THE_FILE:
            return f"metrics {record.name!r} are written to metrics.jsonl alone"
        at = record.measured_at
    else:
        at = record.sent_at
    if at > wall_ms() + MAX_AHEAD_MS:
        return f"its time {at} (Unix milliseconds) is more than a day ahead of this machine's clock"
    return None
