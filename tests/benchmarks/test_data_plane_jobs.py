"""benchmarks/data_plane.py: small jobs of one and of two shards, on a Flink cluster of processes."""

from __future__ import annotations

import os
from argparse import Namespace

import pytest

from benchmarks.data_plane import measure

pytestmark = pytest.mark.skipif("LAMINAR_TEST_FLINK" not in os.environ, reason="make flink-test has it")


@pytest.mark.slow
def test_data_plane_benchmark_measures_flink_jobs_by_shards() -> None:
    found = list(measure(Namespace(shards=[1, 2], trajectories=2_000, tokens=64, rounds=1)))
    assert [each.shards for each in found] == [1, 2]
    for each in found:
        assert each.trajectories >= 2_000
        assert min(each.per_second, each.workers, each.tasks, each.broker) > 0
        assert len(each.split) >= each.shards
        assert sum(each.split) == pytest.approx(1.0)
