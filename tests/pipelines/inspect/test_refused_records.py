"""Which records an observer of a run leaves out."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from record_samples import SAMPLES

from pipelines.inspect.run_state.refused import MAX_AHEAD_MS, refused
from pipelines.inspect.run_state.state import fold_all, new_run
from schemas.records import Metric, PolicyVersion, RelayStatus, ReplicaStatus, WeightVersion

NOW = time.time_ns() // 10**6
VALUES = {"trajectories": 8.0}
V0 = PolicyVersion(1, 0)


@pytest.mark.parametrize(
    ("record", "transactional", "reason"),
    [
        (Metric("trainer", 3, VALUES, NOW), True, None),
        (Metric("trainer", 3, VALUES, NOW), False, "no role wrote"),
        (Metric("rollout", 3, VALUES, NOW), False, None),
        (Metric("rollout", 3, VALUES, NOW + MAX_AHEAD_MS // 2), False, None),
        (Metric("rollout", 3, VALUES, NOW + 2 * MAX_AHEAD_MS), False, "more than a day ahead"),
        (Metric("rollout", 3, VALUES, 2**60), False, "measured_at is"),
        (Metric("rollout", -1, VALUES, NOW), False, "step is -1"),
        (Metric("phase", 0, {}, NOW), True, "metrics.jsonl alone"),
        (Metric("version", 10**9, {}, NOW), True, "metrics.jsonl alone"),
        (replace(SAMPLES[ReplicaStatus], sent_at=NOW + 2 * MAX_AHEAD_MS), False, "more than a day ahead"),
        (replace(SAMPLES[RelayStatus], sent_at=NOW), False, None),
        (
            WeightVersion(V0, None, 0, "f", 8, "0" * 64, (), (), (0,), 0, False, NOW + 2 * MAX_AHEAD_MS),
            True,
            "a day ahead",
        ),
    ],
)
def test_refused_names_why_a_record_does_not_count(record: Any, transactional: bool, reason: str | None) -> None:
    found = refused(record, transactional)
    assert (found is None) == (reason is None)
    assert (reason or "") in (found or "")


def test_state_of_a_run_ignores_refused_metrics() -> None:
    foreign = [Metric("trainer", 10**9, VALUES, NOW), Metric("rollout", 0, VALUES, 2**60)]
    kept = [each for each in foreign if refused(each, False) is None]
    state = fold_all(new_run("r", 7, NOW), [Metric("trainer", 3, VALUES, NOW), *kept])
    assert (state.step, state.now) == (3, NOW)
