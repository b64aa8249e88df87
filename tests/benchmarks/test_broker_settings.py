"""benchmarks/broker_settings.py: a cycle with each kind of setting, and medians."""

from __future__ import annotations

import pytest

from benchmarks.broker_settings import SETTINGS, Cost, measure, median_row
from infra.kafka.broker import JVM_FLAGS


def test_rows_are_medians_of_rounds_with_their_range() -> None:
    row = median_row([Cost(1.0, 5.0, 9.0, 100.0), Cost(2.0, 7.0, 8.0, 300.0), Cost(3.0, 3.0, 7.0, 200.0)])
    assert row == {
        "client, CPU ms": 2.0,
        "broker, CPU ms": 5.0,
        "both": 6.0,
        "least": 6.0,
        "most": 9.0,
        "elapsed, ms": 8.0,
        "log, bytes": 200.0,
    }


def test_second_compiler_is_another_command_line() -> None:
    assert set(JVM_FLAGS) - set(SETTINGS["second compiler"].jvm) == {"-XX:TieredStopAtLevel=1"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["as it is", "second compiler", "zstd"])
def test_cycle_is_measured_with_a_broker_of_its_own(name: str) -> None:
    cost = measure(SETTINGS[name], 20)
    assert min(cost.client, cost.elapsed) > 0
    assert (cost.log_bytes < 8000) == (name == "zstd")
