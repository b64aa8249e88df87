"""CounterReports: when the counters of a shard are written to the metrics of its run."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from record_factories import shard

from infra.runners.liveness import LIVENESS
from operators.io.elements import Checkpoint, Emission
from operators.io.write_transactionally import CounterReports
from schemas.topics import METRICS

pytestmark = pytest.mark.usefixtures("clean_liveness")
SHARD = shard("placement")


@dataclass
class Reports:
    """Every 10 s of a clock that the test moves."""

    now: float = 0.0
    reports: CounterReports = field(init=False)

    def __post_init__(self) -> None:
        self.reports = CounterReports(SHARD, 10.0, lambda: self.now)

    def at(self, now: float, last: bool = False) -> dict[str, float] | None:
        self.now = now
        outputs = self.reports.added_to(Emission(SHARD.group, 1, 1, (), Checkpoint(), last)).outputs
        assert all((each.topic, each.key, each.record.step) == (METRICS, "steps/placement", 0) for each in outputs)
        return outputs[0].record.values if outputs else None


def test_counters_are_reported_when_due_and_changed() -> None:
    reports = Reports()
    LIVENESS.count(SHARD.group, "moved/repack", 2)
    assert reports.at(9) is None
    assert reports.at(10) == {"moved/repack": 2.0}
    assert reports.at(25) is None  # unchanged
    LIVENESS.count(SHARD.group, "moved/repack", 1)
    assert reports.at(26) == {"moved/repack": 3.0}
    LIVENESS.count(SHARD.group, "bytes", 1)
    assert reports.at(35) is None


def test_time_alone_is_no_reason_to_report() -> None:
    reports = Reports()
    LIVENESS.count(SHARD.group, "time_us/dispatch", 1_500_000)
    assert reports.at(20) is None
    LIVENESS.count(SHARD.group, "rejected", 1)
    assert reports.at(21) == {"time/dispatch": 1.5, "rejected": 1.0}


def test_last_emission_of_a_start_has_the_counters() -> None:
    reports = Reports()
    LIVENESS.count(SHARD.group, "bytes", 7)
    assert reports.at(1, last=True) == {"bytes": 7.0}
