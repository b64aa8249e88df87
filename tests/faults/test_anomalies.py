"""The checker finds each anomaly in a log, and none in a clean log."""

from __future__ import annotations

import pytest
from faults.anomalies import Anomalies, anomalies
from faults.log_files import LoggedRecord

CLEAN = ["0/a", "0/b", "1/a", "1/b"]


def log_of(values: list[str], aborted: tuple[str, ...] = ()) -> list[LoggedRecord]:
    outcomes = [(v, "committed") for v in values] + [(v, "aborted") for v in aborted]
    return [LoggedRecord(0, n, None, v.encode(), (), (1, 0), 99, outcome) for n, (v, outcome) in enumerate(outcomes)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (CLEAN, Anomalies()),
        (CLEAN[:2], Anomalies(lost_writes=(1,))),
        ([*CLEAN, "0/a", "0/b"], Anomalies(duplicates=(0,))),
        (CLEAN[:3], Anomalies(torn_transactions=(1,))),
        ([*CLEAN, "2/a", "2/b"], Anomalies()),
    ],
)
def test_checker_names_the_anomaly(values: list[str], found: Anomalies) -> None:
    assert anomalies(log_of(values), 2) == found
    assert bool(found) == (found != Anomalies())


def test_checker_does_not_count_aborted_records() -> None:
    assert anomalies(log_of(CLEAN, aborted=("0/a", "1/b")), 2) == Anomalies()
    assert anomalies(log_of(CLEAN[:2], aborted=("1/a", "1/b")), 2) == Anomalies(lost_writes=(1,))
