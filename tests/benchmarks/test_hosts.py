"""benchmarks/hosts.py: a small run on several hosts, whose network is slow and loses packets."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
from faults.network import NoNetwork

from benchmarks.hosts import compare, run


def test_hosts_benchmark_alternates_its_arms_and_takes_medians() -> None:
    order: list[tuple[bool, int]] = []

    def measure(spread: bool, number: int) -> float:
        order.append((spread, number))
        return (10.0 if spread else 20.0) * (1, 1, 9)[number]

    assert compare(3, measure) == (20.0, 10.0)
    assert order == [(False, 0), (True, 0), (True, 1), (False, 1), (False, 2), (True, 2)]


@pytest.mark.slow
def test_hosts_benchmark_measures_a_run_on_several_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = Namespace(replicas=2, hosts=2, delay_ms=5.0, loss=0.01, batch=16, time_scale=10.0, steps=4, seed=0)
    try:
        throughput = run(options, tmp_path, spread=True)
    except NoNetwork as reason:
        pytest.skip(str(reason))
    assert throughput > 0
    shown = capsys.readouterr().out
    assert "audit passed" in shown
    assert " 0 delayed" not in shown
    assert " 0 lost" not in shown
    assert "% of a core" in shown
